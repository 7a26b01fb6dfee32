"""What a user's file does to the process, and the process to it: settings, threads, helpers of one name."""

import asyncio
import contextlib
import gc
import os
import queue
import sys
import threading
from pathlib import Path

from common import process
from common.data import PromptSet
from common.errors import RunError
from common.files.prompts import read_prompts
from common.models.loading import find_family
from common.rewards._loading import load_rewards
from common.rewards._trial import try_rewards
from common.scoring import Scorer, offload_rewards, score_images
from common.sde import find_step_kind
from common.user_code import loading as user_code
from common.user_code.shared_state import SETTINGS, TRAINERS_SETTINGS

import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.fast
IMAGES = [Image.new("RGB", (8, 8), "red")] * 2
PROMPTS = PromptSet(["a", "b"], [{}, {}])


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    """No user's file has been imported yet."""
    monkeypatch.setattr(user_code, "_taken_in", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for name in sys.modules.keys() - modules:
        if not getattr(sys.modules[name], "__spec__", None) or "site-packages" not in str(sys.modules[name].__spec__):
            del sys.modules[name]


def write(folder, files):
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


# ---- settings of the process -----------------------------------------------------------------------------------------
CHANGES = {
    "torch.set_grad_enabled(False)": "torch's gradients",
    "torch.set_default_dtype(torch.bfloat16)": "torch's default dtype",
    "torch.set_default_device('meta')": "torch's default device",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "torch's number of threads",
    "torch.use_deterministic_algorithms(True, warn_only=True)": "torch's deterministic mode",
    "torch.set_float32_matmul_precision('medium')": "torch's matmul precision",
    "torch.backends.cuda.matmul.allow_tf32 = True": "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.fp32_precision = 'tf32'": "torch.backends.fp32_precision",
    "torch.backends.cudnn.benchmark = True": "torch.backends.cudnn.benchmark",
    "torch.backends.cuda.enable_flash_sdp(False)": "torch's flash attention",
    "torch.autograd.set_detect_anomaly(True)": "torch's anomaly mode",
    "numpy.seterr(all='raise')": "NumPy's errors",
    "PIL.Image.MAX_IMAGE_PIXELS = None": "PIL.Image.MAX_IMAGE_PIXELS",
    "PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True": "PIL.ImageFile.LOAD_TRUNCATED_IMAGES",
    "os.chdir('/')": "the working directory",
    "os.environ['CUDA_VISIBLE_DEVICES'] = '7'": "CUDA_VISIBLE_DEVICES",
    "os.environ.pop('RANK', None)": "RANK",
    "sys.argv[1:] = ['--mine']": "sys.argv",
    "sys.argv = ['mine.py']": "sys.argv",
    "warnings.simplefilter('error')": "warnings as errors",
    "locale.setlocale(locale.LC_ALL, 'C.UTF-8')": "the locale",
    "gc.disable()": "the garbage collector",
}
IMPORTS = "import gc, locale, os, sys, warnings\nimport numpy, torch, PIL.Image, PIL.ImageFile\n"
SCORE = "def mine(images, prompts, metadata):\n    {}\n    return [0.5] * len(images)\n"


def all_settings():
    """Of this thread, and of that of users' files."""

    def read():
        return [setting.read() for setting in SETTINGS + TRAINERS_SETTINGS]

    return read(), user_code.in_user_thread(read)


def reads(folder):
    (folder / "signs.txt").write_text("a\nb\n")
    read_prompts(folder / "signs.txt", load_rewards([f"{folder}/mine.py:mine"], [1.0]))


MOMENTS = {
    "import": (IMPORTS + "{}\n" + SCORE.format(""), lambda folder: load_rewards([f"{folder}/mine.py:mine"], [1.0])),
    "load": (
        IMPORTS + SCORE.format("") + "def load():\n    {}\nmine.load = load\n",
        lambda folder: load_rewards([f"{folder}/mine.py:mine"], [1.0]),
    ),
    "check": (IMPORTS + SCORE.format("") + "def check(prompt):\n    {}\nmine.check = check\n", reads),
    "trial": (
        IMPORTS + SCORE.format("{}"),
        lambda folder: try_rewards(load_rewards([f"{folder}/mine.py:mine"], [1.0]), PROMPTS, (8, 8), 1),
    ),
    "offload": (
        IMPORTS + SCORE.format("") + "def offload():\n    {}\nmine.offload = offload\n",
        lambda folder: offload_rewards(load_rewards([f"{folder}/mine.py:mine"], [1.0])),
    ),
    "step kind": (IMPORTS + "{}\n" + SCORE.format(""), lambda folder: find_step_kind(f"{folder}/mine.py:mine")),
    "prompts": (
        IMPORTS + "def mine():\n    {}\n    return ['a']\n",
        lambda folder: read_prompts(f"{folder}/mine.py:mine"),
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_users_file_changes_is_put_back_and_reported(moment, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    source, act = MOMENTS[moment]
    for number, (change, name) in enumerate(CHANGES.items()):
        folder = tmp_path / str(number)
        write(folder, {"mine.py": source.format(change)})
        before = all_settings()
        if moment == "trial" and "grad" in change:
            continue  # a reward is called without gradients anyway
        if moment == "trial" and any(name == setting.name for setting in TRAINERS_SETTINGS):
            continue  # the trainer itself sets it beside such a call
        if moment == "trial" and "chdir" in change:
            with pytest.raises(RunError, match=" mine "):
                act(folder)
        else:
            act(folder)
        assert all_settings() == before, change
        lines = [line for line in capfd.readouterr().err.splitlines() if name in line]
        assert len(lines) == 1 and str(folder) in lines[0], (change, lines)


def test_what_a_file_changes_is_put_back_where_its_import_fails(tmp_path):
    write(tmp_path, {"mine.py": "import os, torch\nos.chdir('/')\ntorch.set_default_dtype(torch.float16)\n1 / 0\n"})
    before = all_settings()
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        load_rewards([f"{tmp_path}/mine.py:mine"], [1.0])
    assert all_settings() == before


def test_a_family_is_compared_as_well(tmp_path, capfd):
    write(tmp_path, {"mine.py": "import torch\ntorch.set_grad_enabled(False)\nclass Mine:\n    pass\n"})
    with pytest.raises(ValueError, match="^--family .*:Mine: .* Family "):
        find_family("assets/embedded", 32, 96, 1, 1.0, 64, f"{tmp_path}/mine.py:Mine")
    assert torch.is_grad_enabled() and f"{tmp_path}/mine.py" in capfd.readouterr().err


def test_a_change_of_every_call_is_reported_once(tmp_path, capfd):
    write(tmp_path, {"mine.py": IMPORTS + SCORE.format("torch.set_default_dtype(torch.float64)")})
    rewards = load_rewards([f"{tmp_path}/mine.py:mine"], [1.0])
    for _ in range(3):
        score_images(rewards, IMAGES, PROMPTS)
    assert capfd.readouterr().err.count("torch's default dtype") == 1


@contextlib.contextmanager
def collector_held():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("held", [lambda: sdpa_kernel(SDPBackend.MATH), collector_held])
def test_what_the_trainer_sets_beside_a_call_is_not_put_back(held, tmp_path):
    """Its attention kernel and the collector, for a moment that begins before the call and ends within it."""
    began, may_end = threading.Event(), threading.Event()

    def waits(images, prompts, metadata):
        began.set()
        assert may_end.wait(30)
        return [1.0] * len(images)

    scorer = Scorer({"waits": waits}, PROMPTS)
    with held():
        scorer.add([0, 1], IMAGES)
        assert began.wait(30)
    may_end.set()
    scorer.scores()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    assert gc.isenabled()


def test_what_a_reward_sets_for_itself_stays(tmp_path, monkeypatch):
    """Variables and folders of imports, which it needs at its calls."""
    monkeypatch.delenv("MINE_KEY", raising=False)
    write(tmp_path, {"lib/my_late_words.py": "SCORE = 0.25\n"})
    source = f"import os, sys\nos.environ['MINE_KEY'] = '7'\nsys.path.insert(0, {str(tmp_path / 'lib')!r})\n"
    source += "def mine(images, prompts, metadata):\n    import my_late_words\n"
    source += "    return [my_late_words.SCORE * float(os.environ['MINE_KEY'])] * len(images)\n"
    write(tmp_path, {"mine.py": source})
    scores = score_images(load_rewards([f"{tmp_path}/mine.py:mine"], [1.0]), IMAGES, PROMPTS)
    assert scores.tolist() == [[1.75]] * 2
    monkeypatch.delenv("MINE_KEY")


# ---- one thread ------------------------------------------------------------------------------------------------------
DATABASE = "sqlite3.connect(':memory:')"
BOUND = {  # what a file makes of a thread's own, and where: all of these fail when another thread uses it
    "import": f"import sqlite3\nown = [{DATABASE}]\n",
    "load": f"import sqlite3\nown = []\ndef load():\n    own.append({DATABASE})\n",
    "check": f"import sqlite3\nown = []\ndef check(prompt):\n    own[:] = [{DATABASE}]\n",
    "prompts": f"import sqlite3\nown = []\ndef texts():\n    own[:] = [{DATABASE}]\n    return ['a', 'b']\n",
    "first call": f"import sqlite3\nown = []\ndef first():\n    own or own.append({DATABASE})\n",
}
USES = """
def mine(images, prompts, metadata):
    if "first" in globals():
        first()
    return [float(own[0].execute("select 1").fetchone()[0])] * len(images)


def offload():
    own[0].execute("select 1")


mine.offload = offload
for name in ("load", "check"):
    if name in globals():
        setattr(mine, name, globals()[name])
"""


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("moment", BOUND)
def test_what_belongs_to_a_thread_is_made_once(moment, whole_group, tmp_path, one_rank):
    write(tmp_path, {"mine.py": BOUND[moment] + USES + f"mine.whole_group = {whole_group}\n", "signs.txt": "a\nb\n"})
    rewards = load_rewards([f"{tmp_path}/mine.py:mine"], [1.0])
    prompts = read_prompts(f"{tmp_path}/mine.py:texts" if moment == "prompts" else tmp_path / "signs.txt", rewards)
    try_rewards(rewards, prompts, (8, 8), 1, {"mine": [2]})
    for _ in range(2):
        scorer = Scorer(rewards, prompts.select([0, 0]))
        scorer.add([0, 1], IMAGES)
        assert scorer.scores([0, 1], 2).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("loop", ["asyncio.get_event_loop()", "loop", "asyncio"])
def test_an_event_loop_is_there(loop, tmp_path):
    """That of the file's import as well, and after another reward has called asyncio.run, which takes it away."""
    source = "import asyncio\nloop = asyncio.get_event_loop()\nasync def ask(count):\n    return [0.5] * count\n"
    run = "asyncio.run" if loop == "asyncio" else f"{loop}.run_until_complete"
    source += f"def mine(images, prompts, metadata):\n    return {run}(ask(len(images)))\n"
    write(tmp_path, {"mine.py": source})
    rewards = load_rewards([f"{tmp_path}/mine.py:mine"], [1.0])
    for _ in range(2):
        try_rewards(rewards, PROMPTS, (8, 8), 1)
        scorer = Scorer(rewards, PROMPTS)
        scorer.add([0, 1], IMAGES)
        assert scorer.scores().tolist() == [[0.5], [0.5]]


@pytest.mark.parametrize("what", ["asyncio.new_event_loop", "torch.set_num_threads"])
def test_what_fails_before_a_call_is_raised_where_it_is_waited_for(what, monkeypatch):
    """As the new loop's files where the process has too many open."""

    def fails(*_):
        raise OSError("Too many open files")

    def ask():
        with pytest.raises(OSError) as error:
            user_code.in_user_thread(lambda: 1)
        answers.put(str(error.value))

    answers = queue.SimpleQueue()
    user_code.in_user_thread(lambda: asyncio.set_event_loop(None))
    module, name = what.split(".")
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[module], name, fails)
        patched.setattr(torch, "get_num_threads", lambda: threading.get_ident() if "threads" in what else 1)
        threading.Thread(target=ask, daemon=True).start()
        assert answers.get(timeout=30) == "Too many open files"
    assert user_code.in_user_thread(lambda: 1) == 1


def test_an_error_is_told_where_its_source_cannot_be_read(tmp_path, monkeypatch):
    write(tmp_path, {"mine.py": "1 / 0\n"})

    def fails(path):
        raise OSError("Too many open files")

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(ValueError, match=r"ZeroDivisionError.*mine\.py:1"):
        load_rewards([f"{tmp_path}/mine.py:mine"], [1.0])


def test_the_thread_that_scores_starts_its_openmp_threads(monkeypatch):
    """By a product that is large enough, before it waits for the first image."""
    ones, threads = torch.ones, set()

    def noted(*size, **options):
        threads.add(threading.current_thread().name)
        return ones(*size, **options)

    monkeypatch.setattr(torch, "ones", noted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scorer = Scorer({"one": lambda images, prompts, metadata: [1.0] * len(images)}, PROMPTS)
    scorer.add([0, 1], IMAGES)
    scorer.scores()
    assert threads == {user_code.in_user_thread(lambda: threading.current_thread().name)}


def hang_until(event):
    def hangs(images, prompts, metadata):
        event.wait()
        return [1.0] * len(images)

    return hangs


def test_a_wait_for_a_reward_is_told(monkeypatch, capfd):
    """Once, with the name of the reward that is running."""
    monkeypatch.setattr(user_code, "LONG_S", 0.5)
    event = threading.Event()
    rewards = {"quick": lambda images, prompts, metadata: [0.0] * len(images), "slow": hang_until(event)}
    threading.Timer(3.5, event.set).start()
    scores = score_images(rewards, [Image.new("RGB", (2, 2))], PromptSet(["p"], [{}]))
    assert scores.tolist() == [[0.0, 1.0]]
    assert capfd.readouterr().err.count(" reward slow,") == 1


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_reward_that_hangs_is_given_up_after_a_signal_where_torchrun_kills(is_killed, monkeypatch):
    """So that the steps before are saved. Otherwise the step is finished. Later calls have another thread."""
    monkeypatch.setattr(user_code, "GRACE_S", 0.5)
    monkeypatch.setattr(process, "is_killed_early", lambda: is_killed)
    monkeypatch.setattr(process, "caught_signals", [])
    event = threading.Event()
    images, prompts = [Image.new("RGB", (2, 2))], PromptSet(["p"], [{}])
    scorer = Scorer({"slow": hang_until(event)}, prompts)
    scorer.add([0], images)
    process.caught_signals.append(2)
    if is_killed:
        with pytest.raises(RunError, match="^reward slow .* SIGINT"):
            scorer.scores()
        assert score_images({"next": lambda *_: [2.0]}, images, prompts).tolist() == [[2.0]]
        event.set()
    else:
        threading.Timer(3.5, event.set).start()
        assert scorer.scores().tolist() == [[1.0]]


def test_a_reward_that_scores_by_another_one_does_not_wait_for_itself(tmp_path):
    source = "from common.data import PromptSet\nfrom common.rewards import find_reward\n"
    source += "from common.scoring import score_images\n"
    source += "def mine(images, prompts, metadata):\n"
    source += "    other = find_reward('jpeg_compressibility')\n"
    source += "    return score_images({'other': other}, images, PromptSet(prompts, metadata))[:, 0]\n"
    write(tmp_path, {"mine.py": source})
    scores = score_images(load_rewards([f"{tmp_path}/mine.py:mine"], [1.0]), IMAGES, PROMPTS)
    assert scores.shape == (2, 1) and (scores < 0).all()


# ---- helpers of one name ---------------------------------------------------------------------------------------------
def scores_by(statement, value="words.TARGET", at_import=True):
    """A reward 1 for prompts that have `value`, which `statement` imports at the file's import or at the first call."""
    inside = "" if at_import else "\n".join(f"    {line}" for line in statement.splitlines()) + "\n"
    outside = f"{statement}\n" if at_import else ""
    body = f"    return [float({value} in prompt) for prompt in prompts]\n"
    return f"import importlib, os, sys\n{outside}def {{0}}(images, prompts, metadata):\n{inside}{body}"


def two(helper, source, other_source=None):
    """Files of a/ and of b/, each with a reward and a helper of one name."""
    files = {f"{folder}/{helper}": f"TARGET = '{colour}'\n" for folder, colour in (("a", "red"), ("b", "blue"))}
    return files | {"a/score_a.py": source.format("a"), "b/score_b.py": (other_source or source).format("b")}


LIB = "sys.path.insert(0, os.path.dirname(__file__) + '/{}')\nimport words"
LATE = scores_by("import words", at_import=False)
NOTHING = "def {0}(images, prompts, metadata):\n    return [0.0] * len(images)\n"
INSTALLED = scores_by("import packaging", "getattr(packaging, 'TARGET', 'blue')")
REFUSED = {
    "a module": two("words.py", scores_by("import words")),
    "a name of a module": two("words.py", scores_by("from words import TARGET", "TARGET")),
    "a package": two("words/__init__.py", scores_by("import words")),
    "a module of a package": two("kit/words.py", scores_by("from kit import words"))
    | {f"{folder}/kit/__init__.py": "" for folder in "ab"},
    "a module of a folder": two("kit/words.py", scores_by("from kit import words")),
    "a module of a folder, by its name": two("kit/words.py", scores_by("from kit.words import TARGET", "TARGET")),
    "in the function": two("words.py", LATE),
    "in the function of one of them": two("words.py", scores_by("import words"), LATE),
    "by importlib": two("words.py", scores_by("words = importlib.import_module('words')", at_import=False)),
    "by a computed name": two("words.py", scores_by("words = importlib.import_module('wor' + 'ds')")),
    "by a computed name of a package": two(
        "kit/words.py", scores_by("words = importlib.import_module('kit.' + 'words')", at_import=False)
    )
    | {f"{folder}/kit/__init__.py": "" for folder in "ab"},
    "by a computed name in the function": two(
        "words.py", scores_by("words = importlib.import_module('wor' + 'ds')", at_import=False)
    ),
    "where it is no script": two(
        "words.py", scores_by("if __name__ == '__main__':\n    pass\nelse:\n    import words")
    ),
    "by a helper": two("words.py", scores_by("import own_{0}", "own_{0}.TARGET"))
    | {f"{folder}/own_{folder}.py": "from words import TARGET\n" for folder in "ab"},
    "in a folder put on the path": two("lib/words.py", scores_by(LIB.format("lib"))),
    "in a folder put on the path for a moment": two("lib/words.py", scores_by(LIB.format("lib") + "\ndel sys.path[0]")),
    "in a deeper folder, at the first call": two("my/lib/words.py", scores_by(LIB.format("my/lib"), at_import=False)),
    "the first one's, which it does not use": two("words.py", NOTHING, scores_by("import words")),
    "a package and a module": two("words.py", scores_by("import words")) | {"b/words/__init__.py": "TARGET = 'blue'\n"},
}
SETUPS = {f"{folder}/setup.py": f"TARGET = '{colour}'\n" for folder, colour in (("a", "red"), ("b", "blue"))}
OWN = scores_by("own = importlib.import_module('own_' + '{0}')", "own.TARGET")
FOR_OTHERS = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import words\nelse:\n    import own_{0}\n"
FOR_OTHERS += scores_by("if __name__ == '__main__':\n    import words", "own_{0}.TARGET")
ALLOWED = {
    "a neighbour, beside a computed name": (
        SETUPS
        | {"a/own_a.py": "TARGET = 'red'\n", "b/own_b.py": "TARGET = 'blue'\n"}
        | {f"{name}/score_{name}.py": OWN.format(name) for name in "ab"},
        [0.0, 1.0],
    ),
    "for type checkers and scripts": (
        two("words.py", FOR_OTHERS) | {"a/own_a.py": "TARGET = 'red'\n", "b/own_b.py": "TARGET = 'blue'\n"},
        [0.0, 1.0],
    ),
    "the second one's is not used": (two("words.py", scores_by("import words"), NOTHING), [0.0, 0.0]),
    "what is installed comes first": (two("packaging.py", INSTALLED), [1.0, 1.0]),
    "a module of Python": (two("colorsys.py", scores_by("import colorsys", "colorsys.__name__[:0]")), [1.0, 1.0]),
    "a folder with other modules": (
        {"a/kit/first.py": "TARGET = 'red'\n", "b/kit/second.py": "TARGET = 'blue'\n"}
        | {"a/score_a.py": scores_by("from kit import first", "first.TARGET").format("a")}
        | {"b/score_b.py": scores_by("from kit import second", "second.TARGET").format("b")},
        [0.0, 1.0],
    ),
    "a helper that both share": (
        {"lib/words.py": "TARGET = 'blue'\n"}
        | {f"{name}/score_{name}.py": scores_by(LIB.format("../lib")).format(name) for name in "ab"},
        [1.0, 1.0],
    ),
}


def try_both(folder, files):
    """Load and try the rewards a and b. Returns b's and a's scores of a blue sign."""
    write(folder, files)
    rewards = {name: load_rewards([f"{folder}/{name}/score_{name}.py:{name}"], [1.0])[name] for name in "ab"}
    prompts = PromptSet(["a blue sign"], [{}])
    try_rewards(rewards, prompts, (8, 8), 1)
    return score_images(rewards, IMAGES[:1], prompts)[0].tolist()


@pytest.mark.parametrize("kind", REFUSED)
def test_helpers_of_one_name_are_refused(kind, tmp_path):
    with pytest.raises((ValueError, RunError)) as error:
        try_both(tmp_path, REFUSED[kind])
    message = str(error.value)
    assert f"{tmp_path}/a/" in message and f"{tmp_path}/b/" in message and "\n" not in message


def test_subfolders_are_listed_once_for_a_comparison(tmp_path, monkeypatch):
    """There may be thousands, as with a folder of images for each prompt."""
    names = ("colour", "shape", "words")
    source = "".join(f"def {name}():\n    import {name}\n" for name in names) + NOTHING
    write(
        tmp_path, two("lib/other.py", source) | {f"{folder}/images/{i}/0.txt": "" for folder in "ab" for i in range(3)}
    )
    load_rewards([f"{tmp_path}/a/score_a.py:a"], [1.0])
    listed, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: [listed.append(str(folder)), listdir(folder)][1])
    load_rewards([f"{tmp_path}/b/score_b.py:b"], [1.0])
    own = [folder for folder in listed if folder.startswith(f"{tmp_path}/b/lib")]
    assert len(own) == 1


@pytest.mark.parametrize("kind", ALLOWED)
def test_other_helpers_are_not_refused(kind, tmp_path):
    files, scores = ALLOWED[kind]
    assert try_both(tmp_path, files) == scores


OTHERS = {
    "--sde_type": lambda location: find_step_kind(location),
    "prompts of": lambda location: read_prompts(location),
    "--family": lambda location: find_family("assets/embedded", 32, 96, 1, 1.0, 64, location),
    "--eval_reward": lambda location: load_rewards([location], option="--eval_reward"),
}


@pytest.mark.parametrize("option", OTHERS)
def test_helpers_of_files_of_all_options_are_compared(option, tmp_path):
    write(tmp_path, two("words.py", scores_by("import words")))
    load_rewards([f"{tmp_path}/a/score_a.py:a"], [1.0])
    with pytest.raises(ValueError, match=rf"^{option} .*{tmp_path}/a/words.py.*{tmp_path}/b/words.py"):
        OTHERS[option](f"{tmp_path}/b/score_b.py:b")


TAKEN = {
    "a package": ({"common/words.py": "V = 1\n", "common/__init__.py": ""}, "from common.words import V", "common"),
    "a folder": ({"tools/words.py": "V = 1\n"}, "from tools.words import V", "tools"),
    "a module": ({"flow_grpo.py": "V = 1\n"}, "from flow_grpo import V", "flow_grpo"),
    "an attribute": ({"tools.py": "V = 1\n"}, "import tools\ntools.V", "tools"),
    "a helper of a helper": (
        {"mine_helper.py": "import common.words\n", "common/words.py": ""},
        "import mine_helper",
        "common",
    ),
}


@pytest.mark.parametrize("moment", ["import", "load", "call"])
@pytest.mark.parametrize("kind", TAKEN)
def test_a_name_that_cleanflow_has_as_well_is_told(kind, moment, tmp_path):
    helpers, statement, name = TAKEN[kind]
    inside = "\n".join(f"    {line}" for line in statement.splitlines())
    source = {
        "import": f"{statement}\n" + SCORE.format(""),
        "load": SCORE.format("") + f"def load():\n{inside}\nmine.load = load\n",
        "call": f"def mine(images, prompts, metadata):\n{inside}\n    return [0.5] * len(images)\n",
    }[moment]
    write(tmp_path, {**helpers, "mine.py": source})
    with pytest.raises((ValueError, RunError), match=f" {name}, .* CleanFlow "):
        score_images(load_rewards([f"{tmp_path}/mine.py:mine"], [1.0]), IMAGES, PROMPTS)


def test_a_folder_of_that_name_that_is_not_imported_is_not_told(tmp_path):
    write(tmp_path, {"tools/words.py": "", "mine.py": "import json\njson.no_such_thing\n"})
    with pytest.raises(ValueError) as error:
        load_rewards([f"{tmp_path}/mine.py:mine"], [1.0])
    assert "CleanFlow" not in str(error.value)
