"""Stands for vLLM's compiled extension: the few operators that its Python code needs for models in plain PyTorch."""

import torch

_library = torch.library.Library("_C", "FRAGMENT")


def _tensor_over(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CUDA tensor over the memory of ``source`` that does not keep it alive."""
    storage = source.untyped_storage()
    view = {
        "size": tuple(source.shape),
        "stride": source.stride(),
        "dtype": source.dtype,
        "device": device,
        "storage_offset": source.storage_offset(),
        "nbytes": storage.nbytes(),
        "data_ptr": storage.data_ptr(),
    }
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), device, storage.nbytes())
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(view, memory)


def _weak_ref_tensor(source: torch.Tensor) -> torch.Tensor:
    return _tensor_over(source, source.device)


def _cuda_view(source: torch.Tensor) -> torch.Tensor:
    # Pinned host memory has the same address on the device.
    device = torch.device("cuda", torch.cuda.current_device())
    if not source.numel():
        return torch.empty_like(source, device=device)
    if not source.is_pinned():
        raise ValueError("only pinned memory can be seen by the device")
    return _tensor_over(source, device)


_library.define("weak_ref_tensor(Tensor input) -> Tensor")
_library.impl("weak_ref_tensor", _weak_ref_tensor, "CUDA")
_library.define("get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor")
_library.impl("get_cuda_view_from_cpu_tensor", _cuda_view, "CPU")
for _name in (
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
):
    _library.define(f"{_name}(int cuda_device_capability) -> bool")
    _library.impl(_name, lambda capability: False, "CompositeExplicitAutograd")
