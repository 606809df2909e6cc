"""On a real NVIDIA GPU: the same jobs as on the CPU, nearly the same values. Skipped where there is none."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from in_process_job import (
    Cnn,
    Transformer,
    building,
    cross_entropy,
    images,
    job_of,
    mlp,
    plain,
    run_local,
    sgd,
    tokens,
    usual_loop,
    vectors,
)
from job_runner import ALLREDUCE, JobRunner
from torch import nn

import topotrain as tt
from topotrain.config.job import Cluster, Grads, Job
from topotrain.training.parameters.device_copy import WORTH_PINNING, CudaCopier, copiers_for
from topotrain.training.parameters.device_parameters import DeviceParameters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here, or a torch without CUDA")

GPU = torch.device("cuda", 0)
MODELS = {"mlp": (mlp, vectors), "cnn": (Cnn, images), "transformer": (Transformer, tokens)}
JOBS = {
    "sandblaster": job_of("sandblaster"),
    "hidden": job_of("sandblaster", grads=Grads.kHidden),
    "allreduce": job_of("allreduce"),
    "downpour": Job(cluster=Cluster(nworker_groups=2, nworkers_per_group=2, nservers_per_group=2, max_staleness=0)),
    "hogwild": Job(cluster=Cluster(nworker_groups=3, nserver_groups=3)),
    "one": job_of("one"),
}
SYNCHRONOUS = ("sandblaster", "hidden", "allreduce", "one")


@pytest.fixture(autouse=True)
def _exact():
    """Sums of products in float32, whatever the GPU would rather do."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_gpu(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Built on the CPU, so that both have the same first values."""
    return lambda: make().to(GPU)


def moved(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    place = next(model.parameters()).device
    return cross_entropy(model, x.to(place), y.to(place))


def home(result):
    """The result with its values on the CPU."""
    result.values = {name: value.cpu() for name, value in result.values.items()}
    return result


@pytest.mark.parametrize("shared", [False, True], ids=["sent", "shown"])
@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("model", MODELS)
def test_synchronous_jobs_compute_what_the_cpu_computes(model, name, shared):
    make, batches = MODELS[model]
    script = usual_loop(batches(15), moved)
    result = home(run_local(JOBS[name], building(on_gpu(make), sgd), script, shared))
    # Batch statistics are a share's: a CNN is compared with the same job on the CPU.
    wanted = run_local(JOBS[name], building(make, sgd), script) if model == "cnn" else plain(building(make), script)
    assert result.distance(wanted) < 1e-5


def test_parameters_on_two_devices():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(12, 25).to(GPU), nn.Linear(25, 5)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x.to(GPU))).cpu())

    def close(model, x, y):
        return nn.functional.cross_entropy(model(x), y)

    class Whole(Split):
        def __init__(self):
            super().__init__()
            self.cpu()

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    script = usual_loop(vectors(10), close)
    for job in (JOBS["sandblaster"], JOBS["hidden"]):
        assert home(run_local(job, building(Split), script, True)).distance(plain(building(Whole), script)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_and_the_scaler(dtype):
    """As one process on the GPU, in low precision; step 3 overflows and is skipped."""
    scales = []

    def script(t):
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=3, enabled=dtype is torch.float16)
        for step, batch in enumerate(vectors(12)):
            t.optimizer.zero_grad()
            factor = torch.inf if step == 3 and dtype is torch.float16 else 1.0
            with torch.autocast("cuda", dtype=dtype):
                losses = t.losses(moved, *batch)
            t.backward([scaler.scale(loss) * factor for loss in losses])
            scaler.unscale_(t.optimizer)
            nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
            scaler.step(t.optimizer)
            scaler.update()
        scales.append(scaler.get_scale())

    build = building(on_gpu(mlp))
    result, wanted = run_local(JOBS["allreduce"], build, script, True), plain(build, script)
    assert home(result).distance(home(wanted)) < 5e-3
    assert len(set(scales)) == 1


def test_large_buffers_are_pinned_where_they_lie():
    copier = copiers_for([GPU])[GPU]
    assert isinstance(copier, CudaCopier)
    big, small = torch.zeros(WORTH_PINNING), torch.zeros(8)
    try:
        assert copier.reaches(big) and not copier.reaches(small)
        assert big.is_pinned() and copier.bounce(small).is_pinned()
    finally:
        copier.close()
    assert not big.is_pinned()


def test_a_long_queue_on_the_gpu_delays_pushes_and_changes_nothing():
    """Copies wait for the work before them: a hook runs long before its gradient is there."""
    tensor = nn.Parameter(torch.zeros(WORTH_PINNING, device=GPU))
    flats = {name: torch.zeros(WORTH_PINNING) for name in ("params", "local", "grad")}
    mirror = DeviceParameters([tensor], SimpleNamespace(view=lambda name, index: flats[name]))
    told = []
    torch.cuda._sleep(200_000_000)
    gradient = torch.full_like(tensor, 2.0)
    mirror.send(0, gradient)
    del gradient  # its memory is free for what comes next, but not before it is copied
    noise = torch.full_like(tensor, 7.0)
    mirror.then(SimpleNamespace(send=lambda: told.append(float(flats["local"].min()))))
    assert not told
    mirror.drain()
    assert told == [2.0] and float(flats["local"].max()) == 2.0 and float(noise[0]) == 7.0
    mirror.close()


def test_an_ordinary_process_is_given_the_first_gpu():
    assert tt.device() == GPU


@pytest.mark.journey
def test_a_job_of_processes(tmp_path, served_at):
    ended = JobRunner(tmp_path, served_at).run(ALLREDUCE, "on_gpu.py", extra="gpu: 0")
    assert "on cuda:0" in ended.out
    assert ended.report["metrics"]["accuracy"] > 0.9
    assert all(value.device.type == "cpu" and torch.isfinite(value).all() for value in ended.final.values())
