"""Keyed dropout: which mask belongs to which element, and that a recomputation meets it again."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.base.errors import UsageError
from trainer.parallel.dropout import DropoutKeys, DropoutSite, KeyedDropout, MicrobatchKey, _MaskedScale
from trainer.parallel.random import quantised


def keyed(*rows: int, step: int = 0) -> MicrobatchKey:
    return MicrobatchKey(step, torch.tensor(rows))


def site(name: str = "site", seed: int = 1) -> DropoutSite:
    return DropoutSite(DropoutKeys(seed), name)


def drop(key: MicrobatchKey, *shape: int, name: str = "site", seed: int = 1, p: float = 0.5, **cut: int):
    here = replace(site(name, seed), **cut)
    with here.keys.use(key):
        return here.drop(torch.ones(len(key.rows), *shape), p)


class TestMask:
    def test_is_a_function_of_seed_step_row_and_site(self):
        one = drop(keyed(3, 5), 4, 32)
        assert torch.equal(one, drop(keyed(3, 5), 4, 32))
        others = (drop(keyed(3, 5), 4, 32, seed=2), drop(keyed(3, 5), 4, 32, name="b"), drop(keyed(3, 6), 4, 32))
        for other in (*others, drop(keyed(3, 5, step=1), 4, 32)):
            assert not torch.equal(one, other)

    def test_does_not_depend_on_the_other_rows_of_the_microbatch(self):
        whole = drop(keyed(0, 1, 2, 3, 4), 4, 32)
        assert torch.equal(drop(keyed(4, 2), 4, 32), whole[[4, 2]])
        assert torch.equal(drop(keyed(3), 4, 32), whole[3:4])

    def test_does_not_depend_on_padding(self):
        """Hidden states `[batch, sequence, hidden]`, and attention probabilities `[batch, heads, queries, keys]`."""
        assert torch.equal(drop(keyed(7, 8), 5, 32), drop(keyed(7, 8), 9, 32)[:, :5])
        assert torch.equal(drop(keyed(7, 8), 4, 5, 5), drop(keyed(7, 8), 4, 9, 9)[:, :, :5, :5])

    def test_of_a_slice_is_the_slice_of_the_whole(self):
        """A tensor rank's heads, its positions under sequence parallelism, its features between column and row."""
        whole = drop(keyed(0, 1), 4, 6, 10)
        assert torch.equal(drop(keyed(0, 1), 2, 6, 10, cut_dim=1, part=1), whole[:, 2:])
        assert torch.equal(drop(keyed(0, 1), 4, 2, 10, cut_dim=2, part=1), whole[:, :, 2:4])
        assert torch.equal(drop(keyed(0, 1), 4, 6, 5, cut_dim=-1, part=1), whole[..., 5:])

    def test_of_shared_tensors_has_no_batch_and_does_not_depend_on_rows(self):
        here = replace(site(), shared_from=0)

        def mask_for(key: MicrobatchKey, *shape: int) -> torch.Tensor:
            with here.keys.use(key):
                return here.drop(torch.ones(shape), 0.5)

        one = mask_for(keyed(3, 5), 6, 32)
        assert one.shape == (6, 32)
        assert torch.equal(one, mask_for(keyed(8), 6, 32))
        assert torch.equal(one[:2], mask_for(keyed(3, 5), 2, 32)), "not even if it looks like the rows"
        assert not torch.equal(one, mask_for(keyed(3, 5, step=1), 6, 32))
        assert not torch.equal(one[0], one[1])

    def test_of_vectors(self):
        """A pooler's output is `[batch, hidden]`: there is no dimension between."""
        assert torch.equal(drop(keyed(4), 32), drop(keyed(1, 4), 32)[1:])

    def test_a_site_that_is_called_again_draws_again(self):
        here = site()
        ones = torch.ones(1, 64)
        with here.keys.use(keyed(0)):
            first, second = here.drop(ones, 0.5), here.drop(ones, 0.5)
        with here.keys.use(keyed(0)):
            again = here.drop(ones, 0.5), here.drop(ones, 0.5)
        assert not torch.equal(first, second)
        assert torch.equal(first, again[0])
        assert torch.equal(second, again[1])

    def test_of_cached_calls_equals_new_calls(self):
        """The first forward pass computes the key of each call by itself; later steps compute all at once."""
        keys, x = DropoutKeys(1), torch.ones(2, 6, 8)

        def masks(keys: DropoutKeys, step: int) -> list[torch.Tensor]:
            sites = [DropoutSite(keys, "a"), DropoutSite(keys, "b", shared_from=0), DropoutSite(keys, "a")]
            with keys.use(keyed(3, 5, step=step)):
                return [here.drop(x, 0.5) for here in sites]

        masks(keys, 0)
        masks(keys, 1)
        for known, new in zip(masks(keys, 2), masks(DropoutKeys(1), 2), strict=True):
            assert torch.equal(known, new)

    def test_rows_that_are_not_first_are_refused(self):
        here = site("rel")
        words = r"dropout at rel must work on the 2 rows .* its input is \(9, 4\).*layout_invariant_dropout"
        with here.keys.use(keyed(0, 1)), pytest.raises(UsageError, match=words):
            here.drop(torch.ones(9, 4), 0.1)

    def test_more_dimensions_than_a_counter_can_tell_apart_are_refused(self):
        here = site("video")
        words = r"dropout at video works on \(1, 2, 3, 4, 5\).*at most 4 dimensions.*layout_invariant_dropout"
        with here.keys.use(keyed(0)), pytest.raises(UsageError, match=words):
            here.drop(torch.ones(1, 2, 3, 4, 5), 0.1)

    def test_outside_of_a_microbatch_is_our_own_bug(self):
        with pytest.raises(AssertionError, match="outside of a microbatch"):
            site().drop(torch.ones(1, 4), 0.1)


class TestUse:
    def test_the_key_before_comes_back_even_after_an_error(self):
        keys = DropoutKeys(0)
        ones = torch.ones(1, 64)

        def draw():
            return DropoutSite(keys, "site").drop(ones, 0.5)

        with keys.use(keyed(1)):
            undisturbed = draw(), draw()
        with keys.use(keyed(1)):
            first = draw()
            with suppress(ValueError), keys.use(keyed(2)):
                draw()
                raise ValueError
            second = draw()
        assert torch.equal(first, undisturbed[0])
        assert torch.equal(second, undisturbed[1])
        with pytest.raises(AssertionError):
            draw()


class Layer(nn.Module):
    """Two dropouts around a product, one of them called twice."""

    def __init__(self, keys: DropoutKeys) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.twice = KeyedDropout(DropoutSite(keys, "twice"), 0.5)
        self.once = KeyedDropout(DropoutSite(keys, "once"), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.once(self.linear(self.twice(x))) + self.twice(x)


class TestRecomputation:
    """As under a pipeline: two forwards, then the backwards, in which each layer is computed again."""

    def gradients(self, recompute: bool, capture: bool = True) -> list[torch.Tensor]:
        keys = DropoutKeys(0)
        torch.manual_seed(0)
        layers = [Layer(keys), Layer(keys)]  # both use the same sites, as a shared layer does
        contexts = (
            (lambda: (nullcontext(), keys.capture()())) if capture else (lambda: (nullcontext(), keys.use(keyed(8, 9))))
        )
        losses = []
        for key in (keyed(0, 1), keyed(2, 3)):
            with keys.use(key):
                x = torch.ones(2, 4, 16)
                for layer in layers:
                    x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts) if recompute else layer(x)
                losses.append(x.square().sum())
        for loss in losses:
            loss.backward()
        return [parameter.grad for layer in layers for parameter in layer.parameters()]

    def test_meets_the_masks_of_its_own_microbatch_and_call(self):
        for plain, recomputed in zip(self.gradients(recompute=False), self.gradients(recompute=True), strict=True):
            assert torch.equal(plain, recomputed)

    def test_the_test_can_fail(self):
        pairs = zip(self.gradients(recompute=False), self.gradients(recompute=True, capture=False), strict=True)
        assert any(not torch.equal(plain, recomputed) for plain, recomputed in pairs)


class TestScale:
    def test_kept_elements_are_divided_by_the_share_that_is_kept(self):
        values = drop(keyed(*range(8)), 256, p=0.1).unique().tolist()
        assert values == pytest.approx([0.0, 1 / (1 - quantised(0.1))], rel=1e-6)

    def test_the_mean_is_that_of_the_input(self):
        assert drop(keyed(*range(64)), 4096, p=0.25).mean().item() == pytest.approx(1.0, abs=5e-3)

    def test_gradient(self):
        x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        mask = torch.rand(3, 5).gt(0.3).to(torch.uint8)
        assert torch.autograd.gradcheck(lambda x: _MaskedScale.apply(x, mask, 1.25), (x,))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_keeps_the_dtype_and_the_input(self, dtype):
        here, x = site(), torch.ones(1, 8, dtype=dtype)
        with here.keys.use(keyed(0)):
            assert here.drop(x, 0.5).dtype == dtype
        assert torch.equal(x, torch.ones(1, 8, dtype=dtype))


class TestKeyedDropout:
    def test_evaluation_and_probability_zero_need_no_key(self):
        x = torch.randn(2, 4)
        assert KeyedDropout(site(), 0.5).eval()(x) is x
        assert KeyedDropout(site(), 0.0)(x) is x

    def test_drops_while_training(self):
        here = site()
        with here.keys.use(keyed(0, 1)):
            assert (KeyedDropout(here, 0.5)(torch.ones(2, 64)) == 0).any()

    def test_shows_where_it_stands(self):
        assert repr(KeyedDropout(site("a.b"), 0.1)) == "KeyedDropout(p=0.1, site=a.b)"


def test_a_site_of_cut_positions_draws_from_the_first_position_of_its_rank():
    keys, x = DropoutKeys(7), torch.ones(2, 8, 16)
    with keys.use(MicrobatchKey(0, torch.arange(2))):
        whole = DropoutSite(keys, "site").drop(x, 0.5)
    cut = SimpleNamespace(start=3, dim=1)
    with keys.use(MicrobatchKey(0, torch.arange(2))):
        part = DropoutSite(keys, "site", cut_dim=1, sequence=cut).drop(x[:, 3:], 0.5)
    assert torch.equal(part, whole[:, 3:])
