#!/bin/sh
# Slurm: sbatch slurm.sh; sbatch puts it into the queue again after a preemption, and it goes on from its checkpoint.
#SBATCH --job-name=hocket
#SBATCH --nodes=2 --ntasks-per-node=4 --cpus-per-task=8
#SBATCH --requeue
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
srun python resnet.py --strategy agd --out /shared/resnet
