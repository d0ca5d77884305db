"""A loop whose targets are shifted before the model sees the inputs: the last of each row is no input."""

import argparse

import torch
import torch.nn.functional as F
from toy_data import LENGTH, VOCABULARY, llama

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", default="")
args = parser.parse_args()

model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
draw = torch.Generator().manual_seed(1)
text = torch.randint(3, VOCABULARY, (4000,), generator=draw)

for _ in range(4):
    for _ in range(4):
        starts = torch.randint(len(text) - LENGTH - 1, (2,), generator=draw)
        x = torch.stack([text[start : start + LENGTH] for start in starts])
        y = torch.stack([text[start + 1 : start + LENGTH + 1] for start in starts])
        if args.mistake == "mixed-rows":
            y = y.flip(0)
        loss = F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())
        (loss / 4).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
