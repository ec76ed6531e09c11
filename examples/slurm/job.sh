#!/usr/bin/env bash
#SBATCH --job-name=fsdp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # a torchrun on each machine starts the ranks
#SBATCH --gpus-per-node=8          # leave it out on machines without
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120        # two minutes before the time is over
#SBATCH --requeue                  # then, or when a machine fails, the job starts again
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

# sbatch examples/slurm/job.sh
set -euo pipefail

ranks=${SLURM_GPUS_ON_NODE:-2}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # another one for each job
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$ranks} / ranks))
export FOLDER=${FOLDER:-runs/slurm} # on a file system that all machines see

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:$port" \
    examples/two_machines/train.py &
trap 'scontrol requeue "$SLURM_JOB_ID"' TERM
wait $!
