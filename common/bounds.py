"""What an option's value must be, said beside the option: `clip_range: PositiveFloat = 1e-3`."""

from typing import Annotated, NamedTuple


class Bound(NamedTuple):
    """What an option's value, or each of its values, must be; a float must be finite, whatever its bounds."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value):
        if self.at_least is not None and value < self.at_least:
            return False
        if self.above is not None and value <= self.above:
            return False
        if self.at_most is not None and value > self.at_most:
            return False
        return self.below is None or value < self.below

    def __str__(self):
        words = [f"{name.replace('_', ' ')} {limit}" for name, limit in self._asdict().items() if limit is not None]
        return " and ".join(words)


PositiveInt = Annotated[int, Bound(at_least=1)]
NonNegativeInt = Annotated[int, Bound(at_least=0)]
PositiveFloat = Annotated[float, Bound(above=0)]
NonNegativeFloat = Annotated[float, Bound(at_least=0)]


# ---- by what a model can make ----------------------------------------------------------------------------------------
def check_image(height, width, num_frames, unit):
    """Raises ValueError where a side is no multiple of `unit` pixels, or where a video is asked for."""
    if num_frames > 1:
        raise ValueError(f"--num_frames {num_frames}: this model makes images, of 1 frame")
    check_multiples(height, width, unit)


def check_no_guidance(guidance_scale):
    """Raises ValueError where guidance is asked of a model that takes none."""
    if guidance_scale > 1:
        raise ValueError(f"--guidance_scale {guidance_scale:g}: this model was distilled and takes none: pass 1")


def check_multiples(height, width, unit):
    """Raises ValueError where a side is no multiple of `unit` pixels, those of a token's side."""
    if height % unit or width % unit:
        raise ValueError(f"--image_size {height} {width}: must be multiples of {unit}")
