"""Tiny models gain nothing from a second thread, and lose much where other programs compute as well."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
