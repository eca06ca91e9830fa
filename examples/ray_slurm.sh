#!/usr/bin/env bash
# A Ray cluster in one SLURM job, with a node of Muster on each machine: sbatch examples/ray_slurm.sh
# Submit it in the folder of your program, in a Python environment that all machines have. Ray lets in only who knows the
# token of this job. SLURM runs this script on the first machine, and ends what it has started when it ends.
#SBATCH --job-name=muster
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
set -euo pipefail

program=${PROGRAM:-examples/ray_cluster.py}
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=${machines[0]}:6379
workers=$((SLURM_CPUS_PER_TASK > 1 ? SLURM_CPUS_PER_TASK - 1 : 1)) # one CPU is left for the main process

umask 077 # the token is for this user only
token=$PWD/ray-token-$SLURM_JOB_ID
trap 'kill $(jobs -p) 2> /dev/null; rm -f "$token"' EXIT
openssl rand -hex 32 > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token
export RAY_worker_niceness=0 # 15 unless said: nothing else runs on these machines

start_ray() { # on a machine, with options
    srun --overlap --nodes=1 --ntasks=1 -w "$1" ray start "${@:2}" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
}

start_ray "${machines[0]}" --head --port=6379
for _ in {1..120}; do
    if (exec 3<> "/dev/tcp/${address/:/\/}") 2> /dev/null; then break; fi
    sleep 1
done
for machine in "${machines[@]:1}"; do
    start_ray "$machine" --address="$address"
done

# It waits until all machines have joined.
python "$program" --address "$address" --nodes "$SLURM_JOB_NUM_NODES" --workers "$workers" "$@"
