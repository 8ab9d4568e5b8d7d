"""Autograd notices what collectives and messages write: it refuses a backward pass that needs the values before."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from free_port import free_port
from ranks import ranks
