# The demo of the README: docker build -t muster . && docker run --rm muster
# The recording stays in the container unless you mount a folder: -v "$PWD/runs:/muster/runs".
FROM python:3.11-slim

WORKDIR /muster
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt ".[classic]" \
    && useradd --create-home muster && chown muster /muster
USER muster

ENTRYPOINT ["muster"]
CMD ["collect", "CartPole-v1", "--frames", "100k", "--num-envs", "8", "--policy", "mlp", "--seed", "0", "--out", "runs/demo"]
