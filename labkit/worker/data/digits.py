"""Pictures that a package ships: 1,797 handwritten digits of 8 x 8 pixels.

From the UCI repository (Alpaydin and Kaynak 1998), as scikit-learn carries them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Digits(Dataset):
    """`digits[i]` is (pixels, digit): float32 of shape (64,) in 0..1, and an int64.

    Raises:
        ImportError: scikit-learn is not installed.
    """

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # a second, paid by those who use it

        pixels, digits = load_digits(return_X_y=True)
        self.pixels = torch.tensor(pixels, dtype=torch.float32) / 16
        self.digits = torch.tensor(digits, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pixels[index], self.digits[index]
