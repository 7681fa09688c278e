"""Ranks divide the plain loop's batches: each batch once, in order, and equally many on each rank."""

import contextlib
import itertools
import multiprocessing
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from distributed.sharding.test_implicit_loaders import sharding_of
from nano_loop.data.workers import BoundWorker
from nano_loop.distributed.sharding.sharding import BatchSharding
from nano_loop.patching.loaders import changed

# --- loaders ---


class Numbers(Dataset):
    def __init__(self, count=23):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


class Drawing(Sampler):
    """Draws each position when it is requested, as a curriculum does."""

    def __init__(self, draw, count=23):
        self.draw = draw
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            yield self.draw()

    def __len__(self):
        return self.count


class DrawsAtIter(Drawing):
    def __iter__(self):
        return iter([self.draw() for _ in range(self.count)])


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield random.randrange(23)


class OneList(BatchSampler):
    """Reuses the list that it has yielded."""

    def __iter__(self):
        batch = []
        for position in self.sampler:
            batch.append(position)
            if len(batch) == self.batch_size:
                yield batch
                batch.clear()


class OwnShuffle(RandomSampler):
    def __iter__(self):
        return reversed(list(super().__iter__()))


def by_torch():
    return int(torch.randint(23, ()))


def by_random():
    return random.randrange(23)


def by_numpy():
    return int(np.random.randint(23))


def own_generator(made, method):
    """Make a sampler with its own generator."""
    sampler = Drawing(lambda: int(getattr(made, method)(23)))
    sampler.generator = made
    return sampler


def seeded_by_rank():
    """Return a seed that differs on each rank, as a script's may."""
    return 7 + 10 * (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)


def numbers(**options):
    return DataLoader(Numbers(), 4, **options)


LOADERS = {
    "in order": lambda: numbers(),
    "shuffled": lambda: numbers(shuffle=True),
    "a generator of each rank": lambda: numbers(
        shuffle=True, generator=torch.Generator().manual_seed(seeded_by_rank())
    ),
    "a sampler's generator of each rank": lambda: numbers(
        sampler=RandomSampler(Numbers(), generator=torch.Generator().manual_seed(seeded_by_rank()))
    ),
    "weighted": lambda: numbers(sampler=WeightedRandomSampler(torch.ones(23), 30)),
    "subset": lambda: numbers(sampler=SubsetRandomSampler(range(3, 20))),
    "with replacement": lambda: numbers(sampler=RandomSampler(Numbers(), True, 70)),
    "a list": lambda: numbers(sampler=[3, 1, 4, 1, 5, 9, 2, 6, 5]),
    "a list of batches": lambda: DataLoader(Numbers(), batch_sampler=[[3, 1], [4], [1, 5, 9]]),
    "own batch sampler": lambda: DataLoader(Numbers(), batch_sampler=OneList(RandomSampler(Numbers()), 3, False)),
    "torch": lambda: numbers(sampler=Drawing(by_torch)),
    "random": lambda: numbers(sampler=Drawing(by_random)),
    "numpy": lambda: numbers(sampler=Drawing(by_numpy)),
    "torch, at iter": lambda: numbers(sampler=DrawsAtIter(by_torch)),
    "random, in iter of a batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=DrawsAtIter(lambda: [by_random(), by_torch()])
    ),
    "random's own": lambda: numbers(sampler=own_generator(random.Random(seeded_by_rank()), "randrange")),
    "numpy's own": lambda: numbers(sampler=own_generator(np.random.default_rng(seeded_by_rank()), "integers")),
    "numpy's old own": lambda: numbers(sampler=own_generator(np.random.RandomState(seeded_by_rank()), "randint")),
    "a subclass of torch's": lambda: numbers(sampler=OwnShuffle(Numbers())),
    "single items": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "workers": lambda: numbers(shuffle=True, num_workers=1, prefetch_factor=3),
    "persistent workers": lambda: numbers(sampler=Drawing(by_torch), num_workers=1, persistent_workers=True),
}


class Stream(IterableDataset):
    """Draws random numbers during iteration; endless without a count."""

    def __init__(self, count=23, draws=True):
        self.count = count
        self.draws = draws

    def __iter__(self):
        numbers = itertools.count() if self.count is None else range(self.count)
        worker = get_worker_info()
        for number in numbers:
            if worker is None or number % worker.num_workers == worker.id:
                yield [number, int(torch.randint(1000, ())), random.randrange(1000)] if self.draws else number


class Measured(Stream):
    def __len__(self):
        return self.count


STREAMS = {
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "stream, drop_last": lambda: DataLoader(Stream(), batch_size=4, drop_last=True),
    "stream of single items": lambda: DataLoader(Stream(), batch_size=None),
    "stream with workers": lambda: DataLoader(Stream(), batch_size=2, num_workers=2),
    "stream with persistent workers": lambda: DataLoader(
        Stream(), batch_size=2, num_workers=2, persistent_workers=True
    ),
    "data pipe": lambda: DataLoader(IterableWrapper(range(20)), 3),
    "stream, any order": lambda: DataLoader(Stream(), batch_size=2, num_workers=2, in_order=False),
}

# --- loops ---


def seed(rank):
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)


def states():
    return torch.get_rng_state().tolist(), random.getstate(), [*map(str, np.random.get_state())]


def plain_lists(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain_lists(each) for each in batch] if isinstance(batch, (list, tuple)) else batch


def epochs(loader, count=3, most=None):
    return [[plain_lists(batch) for batch in itertools.islice(loader, most)] for _ in range(count)]


def plain_epochs(make, count=3, most=None):
    """Return the plain loop's batches with rank 0's seed, and the final random states."""
    seed(0)
    return epochs(make(), count, most), states()


@contextlib.contextmanager
def sharing(ranks, *loaders, models=(), shard=None):
    """Divide loaders among the ranks, for a loop whose random states differ between the ranks."""
    seed(ranks.rank)
    before = dict(vars(DataLoader))
    with contextlib.ExitStack() as stack:
        for loader in loaders:
            stack.enter_context(changed(loader, BatchSharding(ranks, list(models), shard)))
        yield loaders[0]
    assert dict(vars(DataLoader)) == before
    assert not multiprocessing.active_children()


def shared(team, make, use, size=2, **settings):
    """Return the results of ``use(loader)`` on the ranks that share the loader."""

    def loop(ranks):
        with sharing(ranks, make(), **settings) as loader:
            return use(loader)

    return team(size)(loop)


def sharded_epochs(ranks, make, count=3, most=None, found=False):
    with (finding if found else sharing)(ranks, make()) as loader:
        return epochs(loader, count, most), states()


@contextlib.contextmanager
def finding(ranks, loader):
    """Treat a loader as created by the loop, in a run that has set up a model."""
    step, _ = sharding_of(ranks)
    seed(ranks.rank)
    yield loader
    step.undo()
    assert not multiprocessing.active_children()


def shares_of(batches, size):
    """Return the batches that each rank should get: r, r+N, …, with the last group filled from the first batches."""
    missing = -len(batches) % size
    filled = batches + [batch for batch, _ in zip(itertools.cycle(batches), range(missing), strict=False)]
    return [filled[rank::size] for rank in range(size)]


def by_rank(plain, size):
    """Return the epochs of each rank."""
    return [list(epochs) for epochs in zip(*(shares_of(batches, size) for batches in plain), strict=True)]


# --- order ---

sizes = pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])


found = pytest.mark.parametrize("found", [False, True], ids=["set up", "found"])


@sizes
@found
@pytest.mark.parametrize("name", LOADERS)
def test_ranks_share_the_batches_of_the_plain_loop_epoch_after_epoch(team, name, size, found):
    plain, after = plain_epochs(LOADERS[name])
    results = team(size)(sharded_epochs, LOADERS[name], 3, None, found)
    assert [batches for batches, _ in results] == by_rank(plain, size)
    assert results[0][1] == after, "rank 0's loop would draw other numbers after the epoch than the plain loop"
    if name in ("shuffled", "torch", "random", "numpy", "torch, at iter", "subset"):
        seed(1)
        for _ in range(3):
            torch.empty((), dtype=torch.int64).random_()  # the seed for the loader's workers
        assert results[1][1] == states(), "another rank's own states only give the seed that every loader draws"


@sizes
@pytest.mark.parametrize("name", ["shuffled", "random", "torch", "torch, at iter"])
def test_ranks_agree_where_their_loops_draw_numbers_too(team, name, size):
    def loop(ranks, make):
        with sharing(ranks, make()) as loader:
            seen = []
            for batch in loader:
                seen.append(batch.tolist())
                torch.rand(ranks.rank + 1)
                np.random.rand()
            return seen, states()

    results = team(size)(loop, LOADERS[name])
    reference = team(size)(loop, LOADERS[name])
    assert results == reference
    if name != "torch":  # drawn before the loop's own draws, or unaffected by them
        plain, _ = plain_epochs(LOADERS[name], 1)
        assert [seen for seen, _ in results] == shares_of(plain[0], size)


def test_ranks_draw_one_stream_where_rank_0s_loop_draws_in_between(team):
    def loop(ranks):
        drawn = []
        sampler = Drawing(lambda: drawn.append(by_torch()) or drawn[-1])
        with sharing(ranks, DataLoader(Numbers(), 1, sampler=sampler)) as loader:
            return drawn, [float(torch.rand(())) for _ in loader]

    (drawn, own), (others_drawn, others) = team(2)(loop)
    assert drawn == others_drawn
    assert len(set(drawn)) > 10
    assert own != others


@sizes
def test_ranks_that_the_loop_has_seeded_alike_stay_alike(team, size):
    def draw_after(loader):
        torch.manual_seed(5)
        list(loader)
        return torch.rand(3).tolist()

    results = shared(team, LOADERS["torch"], draw_after, size)
    assert all(result == results[0] for result in results)


# --- number of steps ---


REMAINDERS = {
    "kept": lambda count: DataLoader(Numbers(count), 2, shuffle=bool(count)),
    "dropped": lambda count: DataLoader(Numbers(count), 2, shuffle=bool(count), drop_last=True),
    "of a stream": lambda count: DataLoader(Measured(count, draws=False), batch_size=None),
}


@sizes
@pytest.mark.parametrize("make", REMAINDERS.values(), ids=REMAINDERS)
def test_every_rank_takes_as_many_steps_whatever_remains(team, size, make):
    def loop(ranks):
        seen = []
        for count in range(15):
            with sharing(ranks, make(count)) as loader:
                seen_epochs = epochs(loader, 2)
                steps = len(loader if loader.batch_sampler is None else iter(loader))
                seen.append((seen_epochs, len(loader), steps))
        return seen

    results = team(size)(loop)
    for count in range(15):
        expected = by_rank(plain_epochs(lambda count=count: make(count), 2)[0], size)
        for rank, seen in enumerate(results):
            assert seen[count] == (expected[rank], len(expected[0][0]), len(expected[0][0]))


# --- lengths ---


def test_length_is_the_ranks_own_where_it_is_shared_and_stays_that_of_a_whole_iteration_until_then(team):
    def loop(ranks):
        model = nn.Linear(1, 1)
        lengths = []
        with sharing(ranks, DataLoader(Numbers(), batch_size=4), models=[model]) as loader:
            lengths.append(len(loader))
            with torch.no_grad():
                lengths.append(len(loader))
            model.eval()
            lengths.append(len(loader))
            with torch.no_grad():
                list(loader)
            model.train()
            lengths.append(len(loader))
            lengths += [len(loader) for _ in loader]
            lengths.append(len(loader))
        return [*lengths, len(loader)]

    assert team(2)(loop) == [[3, 6, 6, 6, 3, 3, 3, 3, 6]] * 2


def test_length_that_nobody_knows_is_an_error_as_ever(team):
    def loop(ranks):
        errors = []
        for made in (DataLoader(Stream()), DataLoader(Numbers(), sampler=Endless())):
            with sharing(ranks, made) as loader:
                for ask in (len, lambda each: len(iter(each))):
                    with contextlib.suppress(TypeError):
                        ask(loader)
                        errors.append(ask)
        return errors

    assert team(2)(loop) == [[], []]


# --- undivided loaders ---


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("shuffled", torch.inference_mode),
        *itertools.product(("shuffled", "stream with workers"), (torch.no_grad, contextlib.nullcontext)),
    ],
)
def test_evaluation_sees_the_whole_loader_on_every_rank(team, name, context):
    make = {**LOADERS, **STREAMS}[name]

    def evaluate(ranks):
        model = nn.Linear(1, 1).train(context is not contextlib.nullcontext)
        with sharing(ranks, make(), models=[model]) as loader, context():
            if ranks.rank:
                ranks.barrier()  # until rank 0 has evaluated alone
            seen = epochs(loader)
            if not ranks.rank:
                ranks.barrier()
            return seen

    first, second = team(2)(evaluate)
    assert first == plain_epochs(make)[0]
    assert [samples(epoch) for epoch in second] == [samples(epoch) for epoch in first]


def samples(epoch):
    """Return the sorted samples of an epoch's batches, without a stream's random numbers."""
    flat = [numbers for batch in epoch for numbers in batch]
    return sorted(flat) if all(isinstance(each, int) for each in flat) else sorted(map(str, map(first_of, epoch)))


def first_of(batch):
    return batch[0]


def test_one_model_in_train_mode_is_enough_and_what_is_decided_at_the_start_holds_to_the_end(team):
    def loop(ranks):
        frozen, trained = nn.Linear(1, 1).eval(), nn.Linear(1, 1)
        with sharing(ranks, DataLoader(Numbers(), 4), models=[frozen, trained]) as loader:
            batches = iter(loader)
            first = next(batches).tolist()
            trained.eval()
            with torch.no_grad():
                return [first, *(batch.tolist() for batch in batches)]

    assert team(2)(loop) == shares_of(plain_epochs(LOADERS["in order"], 1)[0][0], 2)


@found
def test_a_persistent_loader_is_whole_and_shared_in_turn(team, found):
    def loop(ranks):
        made = DataLoader(Numbers(), 4, num_workers=1, persistent_workers=True)
        with (finding if found else sharing)(ranks, made) as loader:
            with torch.no_grad():
                whole = epochs(loader, 1)[0]
            workers = {each.pid for each in multiprocessing.active_children()}
            shared = epochs(loader, 1)[0]
            return whole, shared, workers == {each.pid for each in multiprocessing.active_children()}

    plain = plain_epochs(LOADERS["in order"], 1)[0][0]
    assert team(2)(loop) == [(plain, share, True) for share in shares_of(plain, 2)]


# --- streams ---


@sizes
@found
@pytest.mark.parametrize("name", STREAMS)
def test_ranks_share_what_a_stream_yields(team, name, size, found):
    make = STREAMS[name.replace(", any order", " with workers")]
    plain, _ = plain_epochs(make)
    results = team(size)(sharded_epochs, STREAMS[name], 3, None, found)
    assert [batches for batches, _ in results] == by_rank(plain, size)


def test_a_ranks_own_states_are_back_between_a_streams_batches(team):
    results = shared(team, STREAMS["stream"], lambda loader: ([*map(drawn, loader)], random.random()))
    seed(1)
    assert results[1] == ([drawn() for _ in range(3)], random.random())
    assert results[0] != results[1]


def drawn(batch=None):
    return float(torch.rand(()))


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_without_an_end_are_read_a_group_at_a_time(team, workers):
    def loop(ranks):
        read = []

        class Told(Stream):
            def __iter__(self):
                return (read.append(number) or number for number in super().__iter__())

        made = DataLoader(Told(None, draws=False), batch_size=2, num_workers=workers)
        with sharing(ranks, made) as loader:
            found = epochs(loader, 2, most=3)
            read.clear()
            return found, [len(read) for _ in itertools.islice(loader, 3)]

    ahead = [4, 8, 12] if workers == 0 else [0] * 3  # another process reads them
    assert team(2)(loop) == [
        ([[[0, 1], [4, 5], [8, 9]]] * 2, ahead),
        ([[[2, 3], [6, 7], [10, 11]]] * 2, ahead),
    ]


# --- custom samplers ---


def test_endless_samplers_are_drawn_a_group_at_a_time(team):
    def make():
        return DataLoader(Numbers(), 4, sampler=Endless())

    plain, _ = plain_epochs(make, 1, most=6)
    results = team(2)(sharded_epochs, make, 1, 3)
    assert [batches for batches, _ in results] == by_rank(plain, 2)


def test_what_the_loop_changes_in_a_sampler_counts_from_then_on_and_alike(team):
    class Curriculum(Sampler):
        level = epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            for _ in range(4):
                yield self.epoch + self.level

        def __len__(self):
            return 4

    def loop(ranks):
        sampler, seen = Curriculum(), []
        with sharing(ranks, DataLoader(Numbers(), batch_size=1, sampler=sampler)) as loader:
            for epoch in range(3):
                loader.sampler.set_epoch(5 * epoch)
                for batch in loader:
                    seen.append(int(batch))
                    sampler.level += 1
        return seen

    assert team(2)(loop) == [[0, 1, 7, 8, 14, 15]] * 2


def test_sampler_of_the_users_for_other_ranks_is_shared(team):
    def make():
        return DataLoader(Numbers(12), 1, sampler=DistributedSampler(Numbers(12), 3, 0, shuffle=False))

    assert shared(team, make, lambda loader: [int(batch) for batch in loader]) == [[0, 6], [3, 9]]


def test_sampler_that_raises_is_heard_and_leaves_the_states_right(team):
    def loop(ranks):
        def fail():
            torch.rand(1)
            random.random()
            raise KeyError("no such sample")

        with sharing(ranks, DataLoader(Numbers(), 1, sampler=Drawing(fail))) as loader:
            with contextlib.suppress(KeyError):
                list(loader)
                return None
            after = states()
        seed(ranks.rank)
        torch.empty((), dtype=torch.int64).random_()
        if ranks.rank == 0:
            torch.rand(1)
            random.random()
        return after == states()

    assert team(2)(loop) == [True, True]


def test_two_loaders_may_share_a_sampler(team):
    def loop(ranks):
        sampler = RandomSampler(Numbers())
        one, other = (DataLoader(Numbers(), size, sampler=sampler) for size in (4, 2))
        with sharing(ranks, one, other):
            return epochs(one, 1)[0], epochs(other, 1)[0]

    seed(0)
    plain = [epochs(DataLoader(Numbers(), size, shuffle=True), 1)[0] for size in (4, 2)]
    assert team(2)(loop) == list(zip(*(shares_of(batches, 2) for batches in plain), strict=True))


# --- ways to iterate ---


@pytest.mark.parametrize("make", [LOADERS["shuffled"], STREAMS["stream"]])
def test_an_epoch_that_ends_early_is_followed_by_a_new_one(team, make):
    plain, _ = plain_epochs(make, 2, most=4)
    results = team(2)(sharded_epochs, make, 2, 2)
    seen = [batches for batches, _ in results]
    assert [each[0] for each in seen] == shares_of(plain[0], 2)
    assert seen[0][1] != seen[0][0]


def test_a_loader_may_be_iterated_twice_at_once(team):
    def pairs(loader):
        return [plain_lists(each) for each in zip(*zip(loader, loader, strict=True), strict=True)]

    def make():
        return DataLoader(Numbers(8), 2, shuffle=True)

    seed(0)
    plain = pairs(make())
    assert shared(team, make, pairs) == by_rank(plain, 2)


def test_a_thread_may_iterate(team):
    def in_a_thread(loader):
        seen = []
        thread = threading.Thread(target=lambda: seen.extend(epochs(loader, 2)))
        thread.start()
        thread.join()
        return seen

    assert shared(team, LOADERS["shuffled"], in_a_thread) == by_rank(plain_epochs(LOADERS["shuffled"], 2)[0], 2)


@pytest.mark.slow
def test_collate_and_workers_of_spawn_are_the_users(team):
    def make():
        settings = {"collate_fn": len, "worker_init_fn": random.seed, "multiprocessing_context": "spawn"}
        return DataLoader(TensorDataset(torch.arange(8)), 2, num_workers=1, **settings)

    assert shared(team, make, lambda loader: epochs(loader, 1)[0]) == [[2, 2], [2, 2]]


# --- workers ---


def test_cpus_that_are_not_to_be_had_stop_no_worker():
    ran = []
    BoundWorker((1 << 20,), ran.append)(3)
    assert ran == [3]
    BoundWorker((1 << 20,), None)(3)
