"""Settings of every test: offline, and one thread, as tiny models lose more by waiting for threads than they gain."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)
