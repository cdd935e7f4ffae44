"""Faults that real projects had, put into a copy of `rl` one at a time: ``mutants.py FOLDER``.

Each is (file, text, what it becomes, tests that must notice, whose fault it was). The copy and its
tests lie in FOLDER; what survived is printed. Every mutant runs in a fork, so that torch is
imported once.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ACTIONS, ENVS, MEMORY = "test_actions.py", "test_envs.py", "test_memory.py"
NORMALIZE, PPO, BRANCHING, TASKS = (
    "test_normalize.py",
    "test_ppo.py",
    "test_branching.py",
    "test_tasks.py",
)
Mutant = tuple[str, str, str, str, str]
MUTANTS: dict[str, Mutant] = {
    "a limit of time is an end": (
        "ppo.py",
        "torch.where(terminated, 0.0, next_value)",
        "torch.where(terminated | truncated, 0.0, next_value)",
        f"{PPO}::test_advantages_by_hand",
        "CleanRL#198",
    ),
    "a final state has a value": (
        "ppo.py",
        "torch.where(terminated, 0.0, next_value)",
        "next_value",
        f"{PPO}::test_a_value_behind_the_end_is_never_read",
        "openai/baselines",
    ),
    "the trace goes on over a cut": (
        "ppo.py",
        "(~(terminated | truncated))",
        "(~terminated)",
        f"{PPO}::test_advantages_by_hand",
        "CleanRL#408",
    ),
    "no decay of what is seen": (
        "ppo.py",
        "decay = gamma * gae_lambda *",
        "decay = gamma *",
        f"{PPO}::test_advantages_by_hand",
        "hand case G",
    ),
    "the value of the reset state bootstraps": (
        "rollout.py",
        "seen.next_value = torch.where(seen.truncated, seen.next_value, after)",
        "seen.next_value = after",
        f"{PPO}::test_values_of_a_rollout_are_those_of_the_true_next_states",
        "EmbodiChain#610",
    ),
    "the reset row is learned from": (
        "ppo.py",
        "else valid.flatten().nonzero()[:, 0]",
        "else torch.arange(valid.numel())",
        f"{PPO}::test_the_row_of_a_reset_is_no_sample",
        "CleanRL#499",
    ),
    "the reset row counts in episodes": (
        "envs.py",
        "self._length += step.valid",
        "self._length += 1",
        ENVS,
        "Gymnasium#1696",
    ),
    "the shown observation is the next one": (
        "envs.py",
        'final[env] = self._single(_row(info["final_obs"], env))',
        "pass",
        ENVS,
        "Gymnasium#1624",
    ),
    "clipped the wrong way": (
        "ppo.py",
        "torch.min(advantage * ratio",
        "torch.max(advantage * ratio",
        f"{PPO}::test_the_clipped_surrogate_by_hand",
        "hand case Clip",
    ),
    "the value's clip rewards": (
        "ppo.py",
        "error = torch.max(error,",
        "error = torch.min(error,",
        f"{PPO}::test_the_clipped_value_by_hand",
        "openai/baselines#445",
    ),
    "the value's error is whole": (
        "ppo.py",
        "0.5 * mean(error)",
        "mean(error)",
        f"{PPO}::test_the_clipped_value_by_hand",
        "Stable-Baselines3 and CleanRL differ",
    ),
    "entropy is a cost": (
        "ppo.py",
        "- entropy_coef * bonus",
        "+ entropy_coef * bonus",
        f"{PPO}::test_entropy_is_a_bonus",
        "sign",
    ),
    "the divergence is -log r": (
        "ppo.py",
        "kl, kl_plain = mean(ratio - 1 - log_ratio), mean(-log_ratio)",
        "kl, kl_plain = mean(-log_ratio), mean(-log_ratio)",
        f"{PPO}::test_the_clipped_surrogate_by_hand",
        "SB3#417",
    ),
    "the divergence stops nothing": (
        "ppo.py",
        "> recipe.kl_stop:\n                    break",
        "> recipe.kl_stop:\n                    pass",
        f"{PPO}::test_kl_stops_an_update",
        "CleanRL#520",
    ),
    "deviation of one sample": (
        "ppo.py",
        "if count < 2:",
        "if count < 1:",
        f"{PPO}::test_advantages_are_normalized",
        "SB3#440",
    ),
    "deviation of a population": (
        "ppo.py",
        "math.sqrt(squares / (count - 1))",
        "math.sqrt(squares / count)",
        f"{PPO}::test_advantages_are_normalized",
        "hand case Adv norm",
    ),
    "a mask is a large number": (
        "actions.py",
        "logits = logits.masked_fill(~mask, -math.inf)",
        "logits = logits.masked_fill(~mask, -1e8)",
        f"{ACTIONS}::test_large_logits_do_not_pass_a_mask",
        "contrib#200",
    ),
    "a mask does not renormalise": (
        "actions.py",
        "    return F.log_softmax(logits, -1)\n",
        "    return logits - logits.logsumexp(-1, keepdim=True).detach() * 0 - 1\n",
        f"{ACTIONS}::test_a_mask_renormalises",
        "contrib#322",
    ),
    "0 times minus infinity": (
        "actions.py",
        "finite = log_probs.masked_fill(log_probs == -math.inf, 0.0)",
        "finite = log_probs",
        f"{ACTIONS}::test_a_mask_renormalises",
        "contrib#81",
    ),
    "the log-probability is of the clipped action": (
        "actions.py",
        'if self.bound == "tanh":\n            each = each - log_tanh_slope',
        "action = action.clamp(*map(action.new_tensor, (self.low, self.high)))\n"
        "        each = -0.5 * ((action - mean) * (-log_std).exp()) ** 2 - log_std\n"
        "        each = each - 0.5 * LOG_2PI\n"
        '        if self.bound == "tanh":\n            each = each - log_tanh_slope',
        f"{ACTIONS}::test_normal_is_that_of_the_number_before_clipping",
        "continuous detail 5",
    ),
    "the slope of tanh overflows": (
        "actions.py",
        "return 2 * (math.log(2) - u - F.softplus(-2 * u))",
        "return (1 - u.tanh() ** 2 + 1e-6).log()",
        f"{ACTIONS}::test_squashing_never_overflows",
        "ray#14878",
    ),
    "the scale of a squashed action is forgotten": (
        "actions.py",
        "each - log_tanh_slope(action) - self._log_half(params)",
        "each - log_tanh_slope(action)",
        f"{ACTIONS}::test_squashed_log_prob",
        "alf#1055",
    ),
    "entropy of a choice counts every option whole": (
        "actions.py",
        "(log_probs.exp() * torch.stack(inner, -1)).sum(-1)",
        "torch.stack(inner, -1).sum(-1)",
        f"{ACTIONS}::test_only_what_is_chosen_counts",
        "multi_action_head_PPO#1",
    ),
    "what is not chosen has a probability": (
        "actions.py",
        "total = total + torch.where(taken, node.log_prob(p, a, m), 0.0)",
        "total = total + node.log_prob(p, a, m)",
        f"{ACTIONS}::test_two_branches_by_hand",
        "SB3#527",
    ),
    "actions begin at 0": (
        "actions.py",
        "return action[:, 0].astype(np.int64) + self.start",
        "return action[:, 0].astype(np.int64)",
        f"{ACTIONS}::test_environments_take_what_is_decoded",
        "SB3#913",
    ),
    "a state outlives its episode": (
        "memory.py",
        "torch.where(begins[:, None], 0.0, state)",
        "state",
        MEMORY,
        "Mava#1006",
    ),
    "statistics move while a policy acts": (
        "rollout.py",
        "    for t in range(steps):\n",
        "    for t in range(steps):\n        if policy.normalizer is not None:\n"
        "            policy.normalizer.update(torch.from_numpy(vector.obs))\n",
        f"{PPO}::test_the_first_ratio_is_one[normalized]",
        "rl_games#363",
    ),
    "statistics are not saved": (
        "normalize.py",
        'self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))',
        'self.register_buffer("mean", torch.zeros(width, dtype=torch.float64), persistent=False)',
        f"{TASKS}::test_statistics_and_temperatures_are_saved_with_the_policy",
        "CleanRL#425",
    ),
    "statistics are made anew by the loader": (
        "normalize.py",
        "    @torch.no_grad()\n    def update(self, rows",
        "    def init_buffers(self) -> None:\n        self.count.zero_()\n\n"
        "    @torch.no_grad()\n    def update(self, rows",
        f"{TASKS}::test_statistics_and_temperatures_are_saved_with_the_policy",
        "this project",
    ),
    "a return leaks into the next episode": (
        "normalize.py",
        "self.sums = torch.where(ended & valid, 0.0, sums)",
        "self.sums = sums",
        NORMALIZE,
        "Gymnasium#1507",
    ),
    "the generator is not resumed": (
        "state.py",
        'learner.generator.set_state(part["generator"])',
        "pass",
        f"{PPO}::test_a_run_that_was_ended_anywhere_goes_on_exactly[plain]",
        "SB3#1526",
    ),
    "the memory is not resumed": (
        "state.py",
        'self.state = part["memory"]',
        "pass",
        f"{PPO}::test_a_run_that_was_ended_anywhere_goes_on_exactly[memory]",
        "SB3#1643",
    ),
    "environments are not resumed": (
        "state.py",
        'self.vector.restore(part["environments"])',
        "pass",
        f"{PPO}::test_a_run_that_was_ended_anywhere_goes_on_exactly[plain]",
        "SB3#29",
    ),
    "evaluation is on the episodes of training": (
        "envs.py",
        "whole = seed_of(seed, stream, first + env, self._episode[env])",
        "whole = seed_of(seed, first + env, self._episode[env])",
        ENVS,
        "SB3#1480",
    ),
    "a batch decides for a row": (
        "branching.py",
        "return self._grouped(h, self.gate(h).argmax(-1))",
        "return self._grouped(h, self.gate(h).mean(0, keepdim=True).argmax(-1).expand(len(h)))",
        f"{BRANCHING}::test_a_row_decides_for_itself_whatever_the_batch",
        "a gate on the mean of a batch",
    ),
    "a price of the wrong path": (
        "branching.py",
        "total = latent.new_tensor(self.costs)[chosen[..., 0].long()]",
        "total = latent.new_tensor(self.costs)[-1 - chosen[..., 0].long()]",
        f"{BRANCHING}::test_path_and_action_by_hand",
        "sign",
    ),
    "the action of another branch is taken": (
        "branching.py",
        "return torch.stack(each, -2).gather(-2, z).squeeze(-2)",
        "return each[0]",
        f"{BRANCHING}::test_path_and_action_by_hand",
        "index",
    ),
    "the temperature changes the program": (
        "branching.py",
        "return self._grouped(h, self.gate(h).argmax(-1))",
        "return self._grouped(h, (self.gate(h) / self.temperature - 1).abs().argmax(-1))",
        f"{BRANCHING}::test_four_executions_decide_alike",
        "greedy is not what is drawn",
    ),
    "an exported action is not within its bounds": (
        "deployment.py",
        "yield latent.clamp(low, high).unflatten(-1, shape)",
        "yield latent.unflatten(-1, shape)",
        f"{TASKS}::test_what_a_graph_gives_is_what_the_environment_takes",
        "SB3#1211",
    ),
}


def noticed(folder: Path, mutant: Mutant | None, tests: str) -> bool:
    """Whether a test fails with this fault in the copy."""
    import pytest

    shutil.rmtree(folder / "rl", ignore_errors=True)
    shutil.copytree(ROOT / "rl", folder / "rl", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        file, text, becomes, *_ = mutant
        source = (folder / "rl" / file).read_text("utf-8")
        assert text in source, f"{file} no longer holds {text!r}"
        (folder / "rl" / file).write_text(source.replace(text, becomes, 1), "utf-8")
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(folder))
        os.chdir(ROOT)
        place = f"{ROOT / 'tests' / 'rl'}/{tests}"
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", place])
        import rl

        right = str(folder) in str(rl.__file__)
        os._exit(int(code) if right else 99)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), f"pytest ended with {code}"
    return code == 1


def main(folder: Path) -> None:
    """Print what survived; the tests must pass without a fault first."""
    import gymnasium  # noqa: F401 (imported once, for all forks)
    import torch

    import zoo  # noqa: F401

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for tests in sorted({mutant[3] for mutant in MUTANTS.values()}):
        if noticed(folder, None, tests):
            print(f"fails without a fault: {tests}")
    killed = 0
    for name, mutant in MUTANTS.items():
        if noticed(folder, mutant, mutant[3]):
            killed += 1
        else:
            print(f"survived: {name} ({mutant[4]})")
    print(f"{killed} of {len(MUTANTS)} killed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
