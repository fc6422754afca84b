"""Rejoin for PyTorch: attach a model and its optimizer, and train as before."""

from rejoin.torch._data import Batches
from rejoin.torch._session import Session, Step

__all__ = ["Batches", "Session", "Step"]
