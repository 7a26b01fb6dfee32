"""flow_grpo.py with a vLLM-Omni engine that is broken in one way. Run by torchrun: broken_engine.py BREAKAGE [options].

Only messages between trainer and engine are changed, in training rollouts and pushes. The trainer checks as ever.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import flow_grpo
from common.engine.client import VLLMEngine
from common.run.command_line import parse_args
from common.run.ending import friendly_errors


def shifted_sigmas(request):
    """Apply the schedule's shift of 3 once more."""
    sigmas = 3 * request.sigmas / (1 + 2 * request.sigmas)
    return replace(request, sigmas=sigmas, timesteps=1000 * sigmas[:-1], sigma_max=sigmas[1].item())


def without_guidance(request):
    return replace(request, guidance_scale=1.0)


def bf16_latents(answer):
    return {**answer, "latents": answer["latents"].bfloat16().float()}


REQUESTS = {"sigmas": shifted_sigmas, "guidance": without_guidance}
SIGNALS = {"killed": signal.SIGKILL, "stuck": signal.SIGSTOP}  # to the engine, in its second rollout
KILLED_IN_PUSH = "killed_in_push"  # the last rank's, in the push after its second rollout
ANSWERS = {"bf16_latents": bf16_latents}
BREAKAGES = (*REQUESTS, *ANSWERS, *SIGNALS, KILLED_IN_PUSH, "stale")


def break_engine(breakage, engine=VLLMEngine):
    """Patch VLLMEngine. With "stale" the engine keeps the adapter that was verified at the start of the run: it gets
    that adapter again instead of the new one, and reports honestly which adapter it holds."""
    if breakage not in BREAKAGES:
        raise SystemExit(f"broken_engine.py: error: {breakage!r} is none of {', '.join(BREAKAGES)}")
    ask = engine._ask
    answer = engine._answer
    generate = engine.generate
    verify_policy = engine.verify_policy

    def broken_ask(self, operation, *args, **kwargs):
        if operation == "push_lora" and breakage == "stale":
            if getattr(self, "verified", False):
                args = self.first_push
            tensors, config = args
            # copies: the tensors can be the trained ones themselves
            self.first_push = ({name: tensor.clone() for name, tensor in tensors.items()}, config)
        is_last_rank = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        is_push = operation in ("push_lora", "push_weights") and breakage == KILLED_IN_PUSH
        if is_push and is_last_rank and getattr(self, "rollouts", 0) == 2:
            os.kill(self.process.pid, signal.SIGKILL)
        if self.trains and breakage in REQUESTS and operation == "generate":
            args = (REQUESTS[breakage](args[0]),)
        return ask(self, operation, *args, **kwargs)

    def broken_answer(self, number, operation):
        value = answer(self, number, operation)
        if self.trains and breakage in ANSWERS and operation == "generate":
            value = ANSWERS[breakage](value)
        return value

    def broken_generate(self, request, *args, **kwargs):
        self.trains = bool(request.sde_steps) and getattr(self, "verified", False)
        if self.trains:
            self.rollouts = getattr(self, "rollouts", 0) + 1
            if breakage in SIGNALS and self.rollouts == 2:
                os.kill(self.process.pid, SIGNALS[breakage])
        return generate(self, request, *args, **kwargs)

    def then_verified(self, *args):
        verify_policy(self, *args)
        self.verified = True

    engine.trains = False
    engine._ask = broken_ask
    engine._answer = broken_answer
    engine.generate = broken_generate
    engine.verify_policy = then_verified


if __name__ == "__main__":
    break_engine(sys.argv.pop(1))
    with friendly_errors():
        args = flow_grpo.check(parse_args(flow_grpo.Args, __doc__))
        flow_grpo.main(args, flow_grpo.prepare(args))
