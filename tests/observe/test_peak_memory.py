import pytest
import torch

from trainer.observe.peak_memory import peak_memory_bytes


@pytest.mark.alone
def test_the_peak_of_a_process_holds_what_it_allocated():
    before = peak_memory_bytes(torch.device("cpu"))
    assert before > 20 << 20  # torch alone is larger: the unit is bytes
    block = torch.ones(before // 4 + (64 << 20), dtype=torch.uint8).repeat(4)
    after = peak_memory_bytes(torch.device("cpu"))
    assert after - before >= 64 << 20
    del block
    assert peak_memory_bytes(torch.device("cpu")) >= after


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_a_cuda_device_is_that_of_its_tensors():
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    del_me = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    assert peak_memory_bytes(device) >= del_me.numel()
