"""Says what to install where there is no torch; imported before anything else of it is."""

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "this part of Rejoin is for PyTorch, and there is none in this environment: pip install torch", name="torch"
    ) from error

__all__ = ["torch"]
