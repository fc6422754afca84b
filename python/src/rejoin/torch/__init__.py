"""Rejoin for PyTorch: attach a model and its optimizer, and train as before."""

from rejoin import _needs_torch  # noqa: F401 - says what to install
from rejoin.torch._data import Batches
from rejoin.torch._feed import Feed
from rejoin.torch._files import replacing
from rejoin.torch._session import Session
from rejoin.torch._step import Step

__all__ = ["Batches", "Feed", "Session", "Step", "replacing"]
