"""Policies by their cards: answers, episodes, training, graphs that act."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from PIL import Image

import zoo
from rl import probes
from rl.actions import Choice, Joint, Normal, from_plain, only, to_plain, tree_of
from rl.deployment import Acting, _emitted, _specs
from rl.evaluation import evaluate, record
from rl.policy import RECIPES, Policy, PolicyConfig
from rl.ppo import train
from rl.recipe import PPORecipe
from rl.tasks import PolicyTask
from zoo import registry
from zoo.errors import ConfigError, DataError
from zoo.training.command import command
from zoo.training.folder import described, read_recipe

NAMES = [name.partition(".")[0] for name in RECIPES]


def fresh(name: str) -> Any:
    """A policy with random weights that knows its environment."""
    torch.manual_seed(0)
    return registry.load(
        RECIPES and next(n for n in RECIPES if n.startswith(name + ".")), pretrained=False
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_the_policy_of_its_recipe(name: str) -> None:
    from rl.envs import make
    from rl.state import make_policy

    full = next(n for n in RECIPES if n.startswith(name + "."))
    recipe = RECIPES[full]
    vector = make(recipe.env, 1, 0, bound=recipe.bound)
    assert make_policy(vector, recipe).config == fresh(name).config
    assert registry.task_of(fresh(name).card).env == recipe.env


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_actions_whatever_the_batch(name: str) -> None:
    model = fresh(name)
    pipe = zoo.pipeline(model)
    env = gymnasium.make(pipe.task.env)
    seen = [env.observation_space.sample() for _ in range(6)]
    seen = [np.clip(obs, -3, 3) for obs in seen]
    answers = pipe(seen)
    assert all(env.action_space.contains(answer) for answer in answers)
    alone = [pipe(obs) for obs in seen]
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(alone, answers, strict=True))
    env.reset(seed=0)
    env.step(answers[0])


def test_what_is_no_observation_is_refused() -> None:
    pipe = zoo.pipeline(fresh("ppo-cartpole"))
    for raw in ([1.0, 2.0], "left", [np.nan, 0, 0, 0], None):
        with pytest.raises(DataError, match="the observation is"):
            pipe(raw)
    with pytest.raises(AttributeError, match="no attribute 'plays'"):
        pipe.plays()
    with pytest.raises(ConfigError, match="episodes is 0"):
        pipe.play(episodes=0)
    with pytest.raises(ConfigError, match="takes the name of a"):
        pipe.play(episodes=1, video="x.mp4")
    with pytest.raises(ConfigError, match="has no branches"):
        pipe.explain([0.0, 0, 0, 0])
    with pytest.raises(ConfigError, match=r"measured on CartPole-v1/held-out, not on 'Acrobot"):
        pipe.task.trial(pipe.model, "Acrobot-v1/held-out")
    untold = zoo.pipeline(zoo.load("ppo-cartpole", pretrained=False))
    with pytest.raises(ConfigError, match="names no environment"):
        untold.play(episodes=1)


def test_play_is_what_evaluation_says() -> None:
    pipe = zoo.pipeline(fresh("ppo-cartpole"))
    played = pipe.play(episodes=5, seed=3)
    assert played["returns"] == evaluate(pipe.model, "CartPole-v1", 5, seed=3)
    assert played["mean"] == pytest.approx(np.mean(played["returns"]))
    assert played["std"] == pytest.approx(np.std(played["returns"], ddof=1))
    assert pipe.play(episodes=1)["std"] == 0
    values, n, tolerance = pipe.task.trial(pipe.model, "CartPole-v1/held-out")
    assert (n, tolerance) == (100, max(values["standard_error"], 0.01))
    assert values["return"] == np.mean(evaluate(pipe.model, "CartPole-v1", 100, seed=1))


class Drawn(probes.Identity):
    """A probe with pictures: as bright as it is late."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def render(self) -> Any:
        return np.full((8, 12, 3), 10 * self.t, np.uint8)


def test_a_video_is_the_first_episode(tmp_path: Path) -> None:
    recipe = PPORecipe(num_envs=2, steps=8, total_steps=16, minibatches=1, hidden=(4,))
    policy = train(Drawn, recipe).policy
    assert record(policy, Drawn, tmp_path / "new" / "a.gif", every=2) == 4
    with Image.open(tmp_path / "new" / "a.gif") as gif:
        assert (gif.size, gif.n_frames, gif.info["duration"]) == ((12, 8), 4, 200)  # type: ignore[attr-defined]
        shades = []
        for place in range(4):
            gif.seek(place)
            shades.append(gif.convert("RGB").getpixel((0, 0))[0])  # type: ignore[index]
    assert shades == [0, 20, 40, 60]
    with pytest.raises(ConfigError, match="renders nothing"):
        record(policy, probes.Identity, tmp_path / "b.gif")


def test_training_by_a_name_leaves_a_folder_for_pipelines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--total-steps", "1024", "--quiet", "--trackers", "--out", str(tmp_path)]
    assert command(["ppo-cartpole.v1", *flags, "--seed", "3"])() == 0
    assert capsys.readouterr().out.startswith(str(tmp_path / "weights"))
    made, recipe = read_recipe(tmp_path / "recipe.json")
    assert made == "ppo-cartpole.v1"
    assert recipe == replace(RECIPES["ppo-cartpole.v1"], total_steps=1024, seed=3)
    pipe = zoo.pipeline(tmp_path / "weights")
    assert len(pipe.play(episodes=2)["returns"]) == 2
    origin = pipe.card.weights["v1"].origin
    assert (origin["data"], origin["seed"]) == ("CartPole-v1", "3")
    same = train(recipe=recipe).policy
    for name, tensor in same.state_dict().items():
        assert torch.equal(tensor, pipe.model.state_dict()[name])
    with pytest.raises(ConfigError, match="trained on the CPU"):
        PolicyTask.train("ppo-cartpole.v1", recipe, tmp_path, device="cuda")
    other = replace(recipe, hidden=(8,))
    with pytest.raises(ConfigError, match="change the \\[config\\]"):
        PolicyTask.train("ppo-cartpole.v1", other, tmp_path / "other", trackers=(), quiet=True)


def test_statistics_and_temperatures_are_saved_with_the_policy(tmp_path: Path) -> None:
    model = fresh("ppo-mountaincarcontinuous")
    model.normalizer.update(torch.randn(50, 2) * 4 + 1)
    model.scaler.update(torch.randn(50, 1) * 4)
    zoo.save(model, tmp_path / "a")
    loaded = zoo.load(tmp_path / "a")
    assert float(loaded.normalizer.count) == 50
    obs = torch.randn(9, 2)
    assert torch.equal(loaded(obs)[0], model(obs)[0])
    branched = zoo.load("ppo-cartpole", pretrained=False, branches=((), (8,)))
    branched.actor.set_temperature(0.25)
    zoo.save(branched, tmp_path / "b")
    assert float(zoo.load(tmp_path / "b").actor.temperature) == 0.25


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_back(name: str, tmp_path: Path) -> None:
    recipe = replace(
        RECIPES[name], branches=((), (8,)), pricing=replace(PPORecipe().pricing, price=0.1)
    )
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(described(name, recipe)))
    assert read_recipe(path) == (name, recipe)


TREES: dict[str, Any] = {
    "discrete": spaces.Discrete(3, start=-1),
    "array": spaces.MultiDiscrete([2, 3], start=[5, -1]),
    "box": spaces.Box(
        np.array([[-1, 0], [0, 2]], np.float32), np.array([[1, 3], [4, 5]], np.float32)
    ),
    "dict": spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(-2, 2)}),
    "choice": spaces.OneOf((spaces.Discrete(2), spaces.Box(-1, 1, (2,)))),
}


def flattened(action: Any) -> list[Any]:
    if isinstance(action, dict):
        return [x for value in action.values() for x in flattened(value)]
    if isinstance(action, tuple):
        return [x for value in action for x in flattened(value)]
    return [np.asarray(action)]


@pytest.mark.parametrize("bound", ["clip", "tanh"])
@pytest.mark.parametrize("kind", TREES)
def test_what_a_graph_gives_is_what_the_environment_takes(kind: str, bound: Any) -> None:
    tree = tree_of(TREES[kind], bound)
    params = 2 * torch.randn(50, tree.params, generator=torch.Generator().manual_seed(0))
    latent = tree.mode(params)
    parts = list(_emitted(tree, latent))
    specs = dict(_specs(tree, "action"))
    assert [str(p.dtype) for p in parts] == [f"torch.{s.dtype}" for s in specs.values()]
    assert [p.shape[1:] for p in parts] == [s.shape[1:] for s in specs.values()]
    for row in range(50):
        action = only(tree.decode(latent[row : row + 1].numpy()))
        got = [part[row].numpy() for part in parts]
        if isinstance(tree, Choice):  # an index, then every option's part
            index = int(got[0])
            assert index == action[0]
            wanted, got = flattened(action[1]), got[1 + index : 2 + index]
        else:
            wanted = flattened(action)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def policy_of(tree: Any, **changes: Any) -> Policy:
    torch.manual_seed(0)
    policy = Policy(PolicyConfig(observation=5, actions=to_plain(tree), **changes))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_()
    if policy.normalizer is not None:
        policy.normalizer.update(torch.randn(100, 5) * 3 + 1)
    return policy.eval()


GRAPHS: dict[str, Any] = {
    "discrete, normalized, masked": lambda: (
        policy_of(tree_of(TREES["discrete"]), normalize_observations=True),
        True,
    ),
    "choice, memory, masked": lambda: (policy_of(tree_of(TREES["choice"]), memory=6), True),
    "box, squashed": lambda: (policy_of(tree_of(TREES["box"], "tanh")), False),
    "branches": lambda: (policy_of(tree_of(TREES["dict"]), branches=((), (16,))), False),
    "exits": lambda: (policy_of(tree_of(TREES["discrete"]), hidden=(8, 8), exits=True), False),
}


@pytest.mark.untyped
@pytest.mark.parametrize("form", ["onnx", "pt2"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_graphs_are_exported_whole(kind: str, form: Any, tmp_path: Path) -> None:
    policy, masked = GRAPHS[kind]()
    graph = Acting(policy, zoo.card("ppo-cartpole", to_train=True), masked=masked).eval()
    report = zoo.export(graph, tmp_path, format=form)
    assert report.max_abs_diff < 1e-5
    assert len(report.cases) > 3


@pytest.mark.untyped
def test_an_exported_policy_plays_the_same_episodes(tmp_path: Path) -> None:
    import onnxruntime

    pipe = zoo.pipeline(fresh("ppo-acrobot"))
    pipe.model.normalizer.update(torch.randn(50, 6))
    report = zoo.export(pipe.model, tmp_path, raw=True)
    session = onnxruntime.InferenceSession(str(report.path), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["observation"]
    assert [o.name for o in session.get_outputs()] == ["action"]
    for env, steps in ((gymnasium.make("Acrobot-v1"), 60),):
        obs, _ = env.reset(seed=5)
        for _ in range(steps):
            (action,) = session.run(None, {"observation": obs[None]})
            assert action[0] == pipe(obs)
            obs, *_ = env.step(action[0])
    with pytest.raises(zoo.errors.ExportError, match="no card of its raw inputs"):
        zoo.export("resnet18", tmp_path, raw=True, pretrained=False)


def test_trees_of_cards_are_those_of_the_environments() -> None:
    for full, recipe in RECIPES.items():
        env = gymnasium.make(recipe.env)
        card = zoo.card(full.partition(".")[0], to_train=True)
        assert from_plain(card.config["actions"]) == tree_of(env.action_space)
        assert card.config["observation"] == int(np.prod(env.observation_space.shape))  # type: ignore[arg-type]
    assert isinstance(tree_of(TREES["dict"]), Joint)
    assert isinstance(from_plain(card.config["actions"]), Normal)
