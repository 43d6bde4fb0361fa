"""Real training steps, written with the ordinary libraries and not with the simulator's programs, and timed.

They are the judges of :mod:`calibrate.check`: DistributedDataParallel (:mod:`~calibrate.training.ddp`), fully_shard
(:mod:`~calibrate.training.fsdp`), parallelize_module (:mod:`~calibrate.training.tensor_parallel`) and
torch.distributed.pipelining (:mod:`~calibrate.training.pipeline`) train the same network on the same samples with the
same optimizer. Whatever the strategy, the losses must be those of one device, which a test checks.

A script that trains keeps its calls under ``if __name__ == "__main__":``, because it starts processes.
"""

from calibrate.training.pool import Trained, Trainers
from calibrate.training.recipe import Gpt, Perceptron, Recipe, Strategy, TrainingError

__all__ = ["Gpt", "Perceptron", "Recipe", "Strategy", "Trained", "Trainers", "TrainingError"]
