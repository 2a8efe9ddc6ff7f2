# docker build -t training . && docker run --gpus all --rm training make test-gpu
# torch's wheels bring CUDA's libraries; the base brings the compiler that torch.compile and DeepSpeed need.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# hadolint ignore=DL3008  # the base fixes the versions of Ubuntu's packages well enough
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        gcc g++ git python3 python3-dev python3-venv make \
    && rm -rf /var/lib/apt/lists/*

# The image brings a user `ubuntu` with the number 1000, as most hosts do for their first user.
USER 1000
WORKDIR /home/ubuntu/training
# Installed before the code is copied, so that a change of code does not install again.
COPY --chown=1000 requirements.txt requirements-extra.txt Makefile ./
COPY --chown=1000 engine/startup.py engine/make.mk engine/
RUN make setup && rm -rf /home/ubuntu/.cache/pip
COPY --chown=1000 . .
RUN touch .venv/done

CMD ["make", "help"]
