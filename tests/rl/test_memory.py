"""A state begins anew before the first step of an episode, when acting and when learning."""

import torch

from rl.memory import Memory, unroll


def test_a_state_by_hand() -> None:
    # h = h/2 (1 - start) + x with x = 1, start = (0, 0, 1, 0): 1, 1.5, 1, 1.5.
    start = torch.tensor([[False], [False], [True], [False]])
    states = unroll(lambda x, h: h / 2 + x, torch.ones(4, 1, 1), torch.zeros(1, 1), start)
    assert states.flatten().tolist() == [1, 1.5, 1, 1.5]


def test_step_by_step_is_the_sequence_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 4, generator=generator)
    start = torch.rand(6, 3, generator=generator) < 0.3
    memory = Memory(4, 5)
    state = torch.randn(3, 10, generator=generator)
    whole, last = memory(x, state, start)
    for t in range(6):
        out, state = memory(x[t : t + 1], state, start[t : t + 1])
        assert torch.equal(out[0], whole[t])
    assert torch.equal(state, last)
    alone, _ = memory(x[:, 1:2], torch.zeros(1, 10), start[:, 1:2])
    first = int(start[:, 1].int().argmax())
    torch.testing.assert_close(alone[first:, 0], whole[first:, 1])


def test_weights_begin_orthogonal() -> None:
    memory = Memory(5, 5)
    assert memory.first(2).shape == (2, 10)
    weight = memory.cell.weight_hh
    torch.testing.assert_close(weight.T @ weight, torch.eye(5), atol=1e-5, rtol=0)
    assert memory.cell.bias_ih.abs().max() == 0
