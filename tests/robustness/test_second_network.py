"""A fork that trains a second network beside the policy: docs/fork.md, "What else a copy may need", says how.

Only a whole run shows that a checkpoint has the network and its optimizer, and that both go on as if nothing happened.
"""

from tests.conftest import ROOT, SMALL, assert_same, read_metrics, torchrun, whole_checkpoint, without_times

import pytest

# in flow_grpo.py -> in the fork: a critic of the advantages, equal on all ranks as its inputs are
CHANGES = {
    "    parts = inputs.train_set.parts": (
        "    torch.nn.init.zeros_(CRITIC.weight), torch.nn.init.zeros_(CRITIC.bias)\n    parts = inputs.train_set.parts"
    ),
    "            metrics |= log_rollout(": (
        "            loss = (CRITIC(advantages.float()[:, None]) - scores[:, :1].float()).square().mean()\n"
        "            CRITIC_OPTIMIZER.zero_grad()\n"
        "            loss.backward()\n"
        "            CRITIC_OPTIMIZER.step()\n"
        '            metrics["critic/loss"] = loss.item()\n'
        "            metrics |= log_rollout("
    ),
    "    run.save_checkpoint(state,": (
        '    state["critic"] = {"network": CRITIC.state_dict(), "optimizer": CRITIC_OPTIMIZER.state_dict()}\n'
        "    run.save_checkpoint(state,"
    ),
    '    sampler.load_state_dict(state["sampler"])\n': (
        '    sampler.load_state_dict(state["sampler"])\n'
        '    CRITIC.load_state_dict(state["critic"]["network"])\n'
        '    CRITIC_OPTIMIZER.load_state_dict(state["critic"]["optimizer"])\n'
    ),
    "# ==== 2 SETUP ": (
        "CRITIC = torch.nn.Linear(1, 1)\n"
        "CRITIC_OPTIMIZER = torch.optim.Adam(CRITIC.parameters(), lr=0.1)\n\n\n# ==== 2 SETUP "
    ),
}


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_second_network_and_its_optimizer_resume_to_the_bit(tmp_path, weights):
    source = (ROOT / "flow_grpo.py").read_text()
    for before, after in CHANGES.items():
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    (tmp_path / "with_critic.py").write_text(source)
    options = [*SMALL, "--rollout", "local", "--num_prompts", "2", "--num_inference_steps", "3", "--max_prompts", "1"]
    options += ["--num_steps", "2", "--eval_every", "1", "--keep_checkpoints", "2"]
    options += ["--lora_rank", "0", "--learning_rate", "1e-4"] if weights == "full" else []
    first = tmp_path / "runs" / "whole" / "checkpoints" / "step_000001.pt"
    for run, more in (("whole", []), ("resumed", ["--resume", first])):
        nproc = 2 if weights == "full" else 1  # whose checkpoint is of the shards of two ranks
        torchrun(tmp_path, tmp_path / "with_critic.py", *options, "--name", run, *more, nproc=nproc)
    rows = [without_times(read_metrics(tmp_path / "runs" / run)) for run in ("whole", "resumed")]
    assert rows[0][2:] == rows[1] and rows[0][2]["critic/loss"] != rows[0][1]["critic/loss"]
    paths = [tmp_path / "runs" / run / "checkpoints" / "step_000002.pt" for run in ("whole", "resumed")]
    states = [whole_checkpoint(path) for path in paths]
    assert_same(states[0]["critic"], states[1]["critic"])
    assert states[0]["critic"]["network"]["weight"].item() != 0
