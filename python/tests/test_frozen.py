"""Frozen parameters, which are each replica's own, and have to be equal."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from test_ranks import ranks_of  # noqa: E402
from test_session import session  # noqa: E402

import rejoin  # noqa: E402
from rejoin.torch import _frozen  # noqa: E402
from rejoin.torch._frozen import digest, frozen  # noqa: E402
from rejoin.torch._leaving import Leaving  # noqa: E402
from rejoin.torch._ranks import Ranks  # noqa: E402


def test_frozen_parameters_are_told_apart_by_name():
    ranks = Ranks(0, Leaving(), lambda: None)
    assert frozen(torch.nn.Linear(2, 2), ranks) == ""
    layers = [torch.nn.Linear(3, 5, dtype=torch.bfloat16) for _ in range(30)]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    layers[0].weight.requires_grad_(True)
    one = frozen(model, ranks)
    assert one == frozen(model, ranks) and one.startswith("59 frozen: 0 ") and one.count(",") == 29, one
    layers[0].weight.data.add_(1.0)
    assert one == frozen(model, ranks), "it is trained"
    layers[7].weight.data[2, 1] += 0.5
    other = frozen(model, ranks)
    differ = [a.split()[0] for a, b in zip(one.split(", "), other.split(", "), strict=True) if a != b]
    assert differ == ["7"], (one, other)
    assert frozen(model, ranks, held=list(model.parameters())) == ""
    # Each place counts, in a tensor of no whole number of words, too.
    value = torch.arange(13, dtype=torch.int8)
    digests = {digest(value)}
    for i in range(13):
        changed = value.clone()
        changed[i] += 1
        digests.add(digest(changed))
    digests |= {digest(value.flip(0)), digest(value[:12])}
    assert len(digests) == 16


def test_ranks_wait_for_each_other_before_the_session_has_joined():
    """What looks whether the replica is out of its job is refused until then."""

    def check():
        raise rejoin.InvalidArgument("check() before join()")

    store = torch.distributed.HashStore()
    made = ranks_of(store, 2, check)
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(frozen, model, made[0])
        with pytest.raises(TimeoutError):
            first.result(0.3)
        assert frozen(model, made[1]) == first.result(20)
        # Stages of a pipeline: each rank's own are compared with those of the same rank of the other replicas.
        for stage in (torch.nn.Linear(2, 2), torch.nn.Sequential(model, torch.nn.Linear(2, 2).requires_grad_(False))):
            for one in made:
                one._store = torch.distributed.PrefixStore(f"{len(list(stage.parameters()))}", store)
            first = threads.submit(frozen, model, made[0])
            of_stage = frozen(stage, made[1])
            assert first.result(20) == frozen(model, Ranks(0, Leaving(), check))
            assert of_stage.startswith("4 frozen: ") or of_stage == ""


def test_a_digest_is_taken_by_parts_which_need_no_room_for_a_copy(monkeypatch):
    """Of fused weights of several GiB a copy may not fit. Replicas of other releases take the same number."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
                self.bytes = max(self.bytes, out.untyped_storage().nbytes())
            return out

    value = torch.arange(1000, dtype=torch.int16)
    for words in (_frozen._WORDS, 16):
        monkeypatch.setattr(_frozen, "_WORDS", words)
        with Largest() as largest:
            assert digest(value) == 17508342777037349412
            assert digest(value[3:-2]) == 4270265327241288161, "which begins within a word"
        assert largest.bytes <= 8 * words
        assert digest(torch.arange(35.0).reshape(5, 7).t()) == 15387614053464014988
        assert digest(torch.tensor(2.5, dtype=torch.float64)) == 4612811918334230536
        assert digest(torch.tensor([True, False, True])) == 65540
        assert digest(value[:0]) == 0


def test_what_is_frozen_after_attach_is_still_the_sessions_and_comes_from_the_others(tmp_path, monkeypatch):
    """To be thawed later: a replica that has loaded a checkpoint would else be refused for what it will be given."""
    told = []
    for value in (0.0, 1.0):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[1].requires_grad_(False).weight.fill_(0.5)
        model[1].bias.zero_()
        one = session(tmp_path)
        one.attach(model, torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()]))
        model[2].requires_grad_(False)
        model[2].weight.fill_(value)
        monkeypatch.setattr(one, "_native", SimpleNamespace(set_fingerprint=told.append, join=lambda *_: None))
        one.join()
    assert "2 frozen: 1.weight" in told[0] and told[0] == told[1], told
