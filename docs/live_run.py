"""Makes the picture in the README from a real run: `make picture`."""

from __future__ import annotations

from pathlib import Path

from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import labkit as lk
from labkit.view.canvas import static_png


def train_gpt(worker, steps):
    spec = lk.GPT(layers=2, width=64, heads=4, context=64)
    model = DistributedDataParallel(lk.build(spec).to(worker.device))
    optimizer = AdamW(model.parameters(), lr=3e-3)
    data = lk.batches(lk.Text(context=64), worker, global_batch=32, steps=steps)
    for tokens, targets in data:
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss, samples=len(tokens), tokens=tokens.numel())


def main() -> None:
    run = lk.launch(train_gpt, ranks=4, kwargs={"steps": 300})
    picture = static_png(run.telemetry.tables(), run.title)
    Path(__file__).with_name("live_run.png").write_bytes(picture)


if __name__ == "__main__":
    main()
