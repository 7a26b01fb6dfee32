"""benchmarks/hacking.py: areas and thresholds against counts by hand."""

import json

from benchmarks.hacking import area, best_threshold, read_examples, table

import numpy as np
import pytest

pytestmark = pytest.mark.fast


def test_the_area_is_the_share_of_pairs_in_the_right_order():
    scores = np.array([1.0, 2.0, 2.0, 3.0])
    is_hacked = np.array([False, False, True, True])
    assert area(scores, is_hacked) == (2 + 0.5 + 1) / 4  # 3 is above both others; 2 is above 1 and equals 2
    assert best_threshold(scores, is_hacked) == 2.0  # 3 finds half without a false alarm: less than all with half
    assert area(-scores, is_hacked) == pytest.approx(1 - area(scores, is_hacked))


def evaluation(sign_colour, drift):
    return {"sign_colour": sign_colour, "drift": drift, "ocr": 0.5, "diversity": 0.2, "jpeg_compressibility": -0.004}


def test_a_metric_that_tells_much_and_one_that_says_nothing(tmp_path):
    lines = []
    for seed in range(1, 7):
        is_hacked = seed > 3  # of both halves
        later = [evaluation(0.95, 0.3 if is_hacked else 0.1), evaluation(0.9 if is_hacked else 0.95, 0.3)]
        later.append(evaluation(0.8 if is_hacked else 0.95, 0.4 if is_hacked else 0.3))
        lines.append({"stage": "run", "failed": False, "seed": seed, "evaluations": [evaluation(0.96, 0.0), *later]})
    lines.append({"stage": "tune", "failed": False, "seed": 100, "evaluations": []})
    lines.append({"stage": "run", "failed": True, "seed": 9, "evaluations": []})
    record = tmp_path / "record.jsonl"
    record.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    now, ahead = (read_examples(record, ahead=ahead) for ahead in (False, True))
    assert (len(now), sum(e.is_hacked for e in now)) == (18, 6)
    # by the last one; of the hacked runs only the first, as the second is hacked already
    assert (len(ahead), sum(e.is_hacked for e in ahead)) == (3 + 6, 3)
    rows = table(record).splitlines()
    # 0.3 and 0.4 against three of 0.1 and nine of 0.3
    assert rows[2].startswith("| `val/drift_from_base` | now | 0.81 [")
    assert rows[3].startswith("| gain of the trained reward | now | 0.50 [0.50, 0.50] | ")
    assert rows[7].startswith("| `val/drift_from_base` | ahead | 0.75 [")  # 3 x 0.3 against 3 x 0.1 and 3 x 0.3
