"""DDP with no_sync, whose optimizer may step later than the micro-step that reduces."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from toy_data import Rows, llama, save

parser = argparse.ArgumentParser()
parser.add_argument("--late", type=int, default=0, help="micro-steps")
parser.add_argument("--save", default="")
args = parser.parse_args()
n = 4

if not dist.is_initialized():
    dist.init_process_group("gloo")
module = llama()
model = DistributedDataParallel(module)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = Rows(n * 6 * 2 * dist.get_world_size())
for i, batch in enumerate(DataLoader(rows, batch_size=2, sampler=DistributedSampler(rows, shuffle=False))):
    reduces = i % n == n - 1
    with contextlib.nullcontext() if reduces else model.no_sync():
        (model(**batch).loss / n).backward()
    if i >= n - 1 and i % n == (n - 1 + args.late) % n:
        optimizer.step()
        optimizer.zero_grad()
save(module, args.save)
