"""Model families: one file each, found by the pipeline's name. family.py says what a family is."""
