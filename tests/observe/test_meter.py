import pytest
import torch

from trainer.observe.meter import Meter, ModelSize, TimeLeft, peak_flops, peak_memory_bytes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_rates_are_means_over_the_interval(clock):
    meter = Meter(clock=clock)
    for _ in range(4):
        clock.now += 0.5
        meter.add(samples=32, tokens=1000)
    rates = meter.read()
    assert (rates.step_seconds, rates.samples_per_second, rates.tokens_per_second) == (0.5, 64, 2000)
    assert rates.mfu is None


def test_rows_without_tokens_have_no_rate_of_them(clock):
    meter = Meter(ModelSize(10, 1, 1), peak_flops=1e9, clock=clock)
    clock.now += 1
    meter.add(samples=32, tokens=0)
    rates = meter.read()
    assert (rates.samples_per_second, rates.tokens_per_second, rates.mfu) == (32, None, None)


def test_each_interval_starts_anew(clock):
    meter = Meter(clock=clock)
    clock.now += 10
    meter.add(32, 1000)
    meter.read()
    clock.now += 1
    meter.add(16, 500)
    assert meter.read().samples_per_second == 16


def test_a_pause_does_not_count_even_where_it_raises(clock):
    meter = Meter(clock=clock)
    clock.now += 1
    meter.add(32, 1000)

    def fail() -> None:
        clock.now += 100
        raise RuntimeError

    with pytest.raises(RuntimeError), meter.during("evaluation"):
        fail()
    assert meter.read().step_seconds == 1


def test_a_clock_too_coarse_for_the_step_does_not_divide_by_zero(clock):
    meter = Meter(clock=clock)
    meter.add(32, 1000)
    assert meter.read().samples_per_second > 0


def test_flops_of_bert_base():
    # 12 layers of 12 * 768^2 weights in their matrices; 512 tokens. Per layer and token: 6 * 12 h^2 + 12 h s.
    flops = ModelSize(12 * 12 * 768**2, 12, 768).flops_per_token(512)
    assert flops == 12 * (72 * 768**2 + 12 * 768 * 512)


def test_a_frozen_weight_has_no_gradient_of_its_own():
    assert ModelSize(100, 1, 1, num_frozen=90).flops_per_token(1) == 6 * 10 + 4 * 90 + 12


def test_mfu_is_one_where_the_model_uses_the_whole_peak(clock):
    model = ModelSize(num_parameters=1000, num_layers=2, hidden_size=10)
    peak = 1024 * model.flops_per_token(128)  # 8 rows of 128 tokens in a second
    meter = Meter(model, peak, clock)
    clock.now += 2
    meter.add(samples=8, tokens=1024)
    assert meter.read().mfu == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "fp16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA A10", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.25),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("Tesla T4", "fp16", 65),
    ],
)
def test_peak_of_known_devices(name, precision, tera):
    assert peak_flops(name, precision) == tera * 1e12


@pytest.mark.parametrize(
    "name",
    ["cpu", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA RTX 5000 Ada Generation Laptop GPU", "NVIDIA GeForce RTX 4090 D",
     "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
     "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A800-SXM4-80GB", "Tesla V100S-PCIE-32GB"],
)  # fmt: skip
def test_no_peak_is_guessed(name):
    assert peak_flops(name, "fp32") is None


def test_a_type_that_the_device_lacks_has_no_peak():
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None


def test_time_left(clock):
    left = TimeLeft(10, 30, clock)
    assert left.after(10) is None
    clock.now += 5
    assert left.after(20) == 5
    assert left.after(30) == 0


@pytest.mark.alone
def test_the_peak_of_a_process_includes_its_allocations():
    before = peak_memory_bytes(torch.device("cpu"))
    assert before > 20 << 20  # torch alone is larger: the unit is bytes
    block = torch.ones(before // 4 + (64 << 20), dtype=torch.uint8).repeat(4)
    after = peak_memory_bytes(torch.device("cpu"))
    assert after - before >= 64 << 20
    del block
    assert peak_memory_bytes(torch.device("cpu")) >= after


def test_the_peak_of_a_gpu_leaves_out_memory_that_the_allocator_keeps(monkeypatch):
    """Torch's allocator counts each GPU by itself; it keeps freed memory, and rounds requests up."""
    counts = {"allocated_bytes.all.peak": 5, "allocated_bytes.all.current": 3, "active_bytes.all.peak": 6}
    counts |= {"requested_bytes.all.peak": 4, "reserved_bytes.all.peak": 9}
    gpus = [counts, {name: 10 * value for name, value in counts.items()}]
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", lambda device: gpus[device.index])
    assert [peak_memory_bytes(torch.device("cuda", index)) for index in (0, 1)] == [5, 50]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_a_cuda_device_is_that_of_its_tensors():
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    del_me = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    assert peak_memory_bytes(device) >= del_me.numel()
