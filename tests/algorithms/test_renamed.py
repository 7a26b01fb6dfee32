"""common/ knows no algorithm: a script whose own options, metrics and phases have other names does the same."""

import ast
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

from common.data import PromptSet
from common.models.loading import family_class
from common.plan import needs
from common.plan.memory import Blueprint
from common.run import inputs as inputs_module
from common.run.inputs import Inputs, choose_sizes
from common.weights.lora import make_lora
from common.workload import Workload
from tests.algorithms.test_contrib import SCRIPTS as CONTRIB
from tests.algorithms.test_mains import TOY
from tests.algorithms.toy_family import toy_model
from tests.conftest import (
    EMBEDDED,
    ROOT,
    SCRIPTS,
    own_options,
    read_metrics,
    shared_options,
    torchrun,
    without_times,
)
from tools import plan

import pytest
import torch

METRICS = re.compile(r"(actor|critic|old_policy|training|rollout_corr|reward)/")  # as scripts name theirs
NUM_BYTES = 8e10  # of a GPU
WHOLE_GROUPS = [f"contrib/{name}.py" for name in ("crd", "dgpo", "online_dpo", "tdm_r1", "v_grpo")]


class Renamer(ast.NodeTransformer):
    """Gives the options that a script alone declares, and its metrics and phases, a name that begins with my_."""

    def __init__(self, own: set[str]) -> None:
        self.own = own
        self.options: set[str] = set()
        self.metrics: set[str] = set()
        self.phases: set[str] = set()

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        if node.name == "Args":
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and field.target.id in self.own:
                    self.options.add(field.target.id)
                    field.target.id = f"my_{field.target.id}"
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in ("args", "eval_args") and node.attr in self.own:
            node.attr = f"my_{node.attr}"
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        called = ast.unparse(node.func)
        if called == "replace" and ast.unparse(node.args[0]) == "args":
            for keyword in node.keywords:
                keyword.arg = f"my_{keyword.arg}" if keyword.arg in self.own else keyword.arg
        if called == "run.timed":
            self.phases.add(node.args[0].value)
            node.args[0].value = f"my_{node.args[0].value}"
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and METRICS.match(node.value):
            self.metrics.add(node.value)
            node.value = f"my_{node.value}"
        return node


def rename(script: str, folder: Path) -> tuple[Path, Renamer]:
    """A copy of the script with other names, in `folder`; and what was renamed."""
    renamer = Renamer(own_options(script).keys() - shared_options().keys())
    tree = renamer.visit(ast.parse((ROOT / script).read_text()))
    copy = folder / f"renamed_{Path(script).name}"
    copy.write_text(ast.unparse(tree) + "\n")
    return copy, renamer


@pytest.fixture(scope="module")
def blueprint():
    """The embedded model's, with a LoRA. Each kind of pass is counted once."""
    family = family_class(EMBEDDED)
    found = Blueprint(family, str(EMBEDDED), make_lora(family, rank=16, alpha=32), torch.float32)
    for name in ("velocity", "decoding"):
        counted: dict = {}
        count = getattr(found, name)

        def once(*given, count=count, counted=counted, **more):
            key = repr((given, sorted(more.items())))
            if key not in counted:
                counted[key] = count(*given, **more)
            return counted[key]

        setattr(found, name, once)
    return found


@pytest.fixture
def two_gpus(monkeypatch, blueprint, tmp_path):
    """This process as rank 0 of two ranks with a GPU each."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (NUM_BYTES, NUM_BYTES))
    for module in (needs, inputs_module):
        monkeypatch.setattr(module, "gather_objects", lambda value: [value])
    monkeypatch.setattr(needs, "Blueprint", lambda *given, **more: blueprint)
    monkeypatch.setattr(plan, "Blueprint", lambda *given, **more: blueprint)


def sizes_and_plan(script: Path, options: list[str]) -> tuple[Workload, dict[str, int], str]:
    """A script's workload, and what choose_sizes and tools.plan say of it."""
    module = plan.load_script(str(script))
    args = module.check(module.parse_args(module.Args, "", options))
    family = family_class(EMBEDDED)
    prompts = PromptSet(["a sign"], [{}])
    lora = make_lora(family, rank=16, alpha=32)
    inputs = Inputs(family, {}, {}, prompts, prompts, lora=lora, checkpoint=None)
    workload = module.workload(args)
    chosen = choose_sizes(args, inputs, workload)
    printed = io.StringIO()
    with redirect_stdout(printed):
        plan.plan("h100-80", str(script), options, 2, 2)
    return workload, {name: getattr(chosen, name) for name in ("micro_batch_size", "shard_ranks")}, printed.getvalue()


@pytest.mark.fast
@pytest.mark.parametrize("script", [*SCRIPTS, *CONTRIB])
def test_a_script_with_other_names_has_the_same_plan_and_sizes(script, two_gpus, tmp_path):
    """Their passes hold whole groups, or pairs, in the four that take no 0."""
    copy, renamer = rename(script, tmp_path)
    assert len(renamer.options) > 3 and renamer.metrics and (renamer.phases or "draft" in script)
    options = ["--micro_batch_size", "16" if script in WHOLE_GROUPS else "0"]
    teachers = ["a=x", "b=y"] if script == "contrib/diffusion_opd.py" else []  # it has no default
    plain = sizes_and_plan(ROOT / script, options + ["--teachers", *teachers] * bool(teachers))
    assert sizes_and_plan(copy, options + ["--my_teachers", *teachers] * bool(teachers)) == plain
    assert plain[1]["shard_ranks"] == 1 and plain[1]["micro_batch_size"] >= 8


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_with_other_names_computes_the_same_numbers(script, tmp_path, monkeypatch):
    """Two steps of the toy model; as only a whole run shows which metrics and options the library reads by name."""
    copy, renamer = rename(script, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    own = {"num_prompts": 4, "group_size": 4, "kl_coef": 0.1, "guidance_scale": 2.0, "num_pairs": 4}
    own |= {"num_pair_prompts": 4, "num_inference_steps": 4}
    shared = ["--micro_batch_size", 4, "--num_steps", 2, "--eval_every", 2, "--eval_guidance_scale", 1.0]
    shared += ["--model", toy_model(), "--family", f"{TOY}:Toy", "--image_size", 2, 2, "--reward", f"{TOY}:closeness"]
    shared += ["--lora_rank", 1, "--ema_decay", 0.5]
    for name in ("train", "eval"):
        (tmp_path / f"{name}.txt").write_text("1 0.5 0\n-0.5 1 0\n0.75 -1 0\n0.3 1 0\n")
        shared += [f"--{name}_prompts", tmp_path / f"{name}.txt"]
    if script != "dpo_offline.py":
        shared += ["--rollout", "local"]
    rows = {}
    for name, file, prefix in (("plain", ROOT / script, ""), ("renamed", copy, "my_")):
        given = [word for option in own if option in renamer.options for word in (f"--{prefix}{option}", own[option])]
        torchrun(tmp_path, file, "--name", name, *shared, *given)
        rows[name] = without_times(read_metrics(tmp_path / "runs" / name))
    names = {name for row in rows["renamed"] for name in row if name.startswith("my_")}
    assert len(names) > 8
    renamed_back = [{name.removeprefix("my_"): value for name, value in row.items()} for row in rows["renamed"]]
    assert renamed_back == rows["plain"]
