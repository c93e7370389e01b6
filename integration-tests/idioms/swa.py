"""SWA: after some steps the weights are averaged, the rate is held, and statistics are made anew for the average."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from idioms.batches import CLASSES, FEATURES, classified, mlp
from idioms.side import Side, Told, flat

#: BatchNorm sees a rank's own samples.
EXACT = False


def train(side: Side) -> Told:
    model = nn.Sequential(mlp(FEATURES, 8), nn.BatchNorm1d(8).double(), nn.ReLU(), mlp(8, CLASSES, seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = AveragedModel(model)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    session = side.attach(model, optimizer, average=average, scheduler=scheduler)
    for step in side.steps(7):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step >= 3:
            session.settle()
            average.update_parameters(model)
            scheduler.step()
    update_bn(((side.share(classified(step)[0]),) for step in range(3)), average)
    return {"average": flat(average)}
