"""benchmarks/second_task.py: equal images, which LoRA a part takes, what prompts ask for, and the tables by hand."""

import importlib
import json

from benchmarks import second_task
from benchmarks.comparison import make_job
from benchmarks.second_task import ALL_ARMS, HELD_OUT

import pytest

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("arm", ALL_ARMS)
def test_an_arm_samples_as_many_images_as_any_other_and_takes_its_own_loras(arm, monkeypatch):
    from common.run.command_line import parse_args

    monkeypatch.setenv("WORLD_SIZE", "1")
    images, adapters = 0, {}
    for part in ALL_ARMS[arm]:
        command = second_task.command_of(make_job("second_task", 36, arm, 3), part, "again-")
        script = command[command.index("--name") - 1]
        module = importlib.import_module(script.removesuffix(".py"))
        args = module.check(parse_args(module.Args, module.__doc__, command[command.index("--name") : -2]))
        images += args.num_steps * args.num_prompts * args.group_size
        assert args.seed == 3 and args.name.startswith("again-second-") and args.learning_rate == 1e-3
        assert len(args.train_prompts) == len(args.reward) == len(args.reward_weights)
        assert len({*args.reward, *args.eval_reward}) == len(args.eval_prompts) == 2
        taken = [args.lora_path] if args.lora_path else []
        taken += [given.partition("=")[2] for given in getattr(args, "teachers", ())]
        assert taken == [adapters[name] for name in (part["starts_from"], *part["teachers"]) if name]
        adapters[part["name"]] = f"runs/{args.name}/adapter"
    assert images == 36 * 128


def test_training_prompts_name_their_teacher_and_held_out_numbers_both_rewards(tmp_path):
    second_task.prompts(tmp_path)
    first = {path.relative_to(tmp_path).as_posix(): path.open().readline() for path in tmp_path.glob("*/*.jsonl")}
    asked = {path: json.loads(text) for path, text in first.items()}
    assert {path: (one["rewards"], one.get("teacher")) for path, one in asked.items()} == {
        "train/numbers.jsonl": (["ocr"], "teacher_numbers"),
        "train/both.jsonl": (["ocr", "sign_colour"], "teacher_both"),
        "train/plain.jsonl": (["sign_colour"], "teacher_plain"),
        "eval/numbers.jsonl": (["ocr", "sign_colour"], None),
        "eval/plain.jsonl": (["sign_colour"], None),
    }


def line_of(arm, seed, ends):
    """A line of the record: ends is (ocr, colour of plain signs) after each part."""
    parts = []
    for part, (ocr, colour) in zip(ALL_ARMS[arm], ends, strict=True):
        values = [{"rollouts": 0, "ocr": 0.6, "colour": 0.7}, {"rollouts": 9, "ocr": ocr, "colour": colour}]
        keys = ("ocr", "colour", "colour")  # HELD_OUT's
        evaluations = [
            {"rollouts": one["rollouts"]} | dict(zip(HELD_OUT, map(one.get, keys), strict=True)) for one in values
        ]
        parts.append({"name": part["name"], "evaluations": evaluations})
    return make_job("second_task", 36, arm, seed) | {"parts": parts}


def test_tables_are_of_the_seeds_that_have_every_arm(tmp_path, capsys):
    path = tmp_path / "record.jsonl"
    lines = [line_of("mixed", 3, [(0.0, 0.0)])]
    lines += [line_of("both_sum", seed, [(0.7, 0.8)]) for seed in (1, 2, 3)]
    lines += [line_of("both_gdpo", seed, [(0.7, 0.9)]) for seed in (3, 2)]
    for seed, mixed in ((1, 0.8), (2, 0.9)):
        lines += [line_of("mixed", seed, [(mixed, 0.8)]), line_of("gdpo", seed, [(0.8, 0.8)])]
        lines.append(line_of("stages", seed, [(0.8, 0.7), (0.7, 0.9)]))
        lines.append(line_of("teachers", seed, [(0.9, 0.6), (0.5, 0.9), (0.8, 0.8)]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    second_task.print_tables(path)
    before, base, forgotten, *_, later_base, end = capsys.readouterr().out.split("\n\n")
    # mixed: ocr .8 and .9, from .6; t of one degree of freedom is 12.706, the standard error .05
    assert "| mixed | 2 | 0.825 (0.800 to 0.850), +0.175 [-0.143, +0.493] | 0.850 (0.800 to 0.900), +0.250 " in before
    assert "| teachers, teacher_plain | 2 | 0.700 (0.700 to 0.700), +0.050 [+0.050, +0.050] | 0.500 " in before
    assert "| before | 2 | 0.650 (0.650 to 0.650) | 0.600 " in before
    assert "| teachers | 2 | 0.800 (0.800 to 0.800), -0.025 [-0.343, +0.293] | 0.800 (0.800 to 0.800), -0.050 " in base
    # of the second stage, against the first
    assert (
        "| stages | 2 | 0.800 (0.800 to 0.800), +0.050 [+0.050, +0.050] | 0.700 (0.700 to 0.700), -0.100 " in forgotten
    )
    assert end == "" and later_base.splitlines()[2].startswith("| both_sum | 2 | 0.750 ")
    assert "| both_gdpo | 2 | 0.800 (0.800 to 0.800), +0.050 [+0.050, +0.050] | 0.700 " in later_base
