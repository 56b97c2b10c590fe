# One image for every node and for a machine of its own:
#
#     docker build -t pdserve .                                      # torch with CUDA, from PyPI
#     docker build -t pdserve --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#     docker run --rm --network host --shm-size 1g pdserve           # the trial, on loopback
#     docker run --rm --network host --shm-size 1g --gpus all pdserve serve --config FILE
#
# On the host's network, since the doors are on loopback unless the deploy file says otherwise.
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${PYTHON} AS build
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/pdserve
ENV PATH=/opt/pdserve/bin:$PATH
COPY constraints.txt ./
# A layer of its own: it is the largest, and changes least. A torch index need not have the pinned
# versions of what torch itself needs, so they are put right below.
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)" \
    && grep -v '^torch==' constraints.txt > pins.txt
COPY pyproject.toml ./
COPY cluster ./cluster
COPY prefill_worker ./prefill_worker
COPY decode_worker ./decode_worker
COPY router ./router
COPY deploy ./deploy
RUN pip install -c pins.txt hatchling editables \
    && pip install -c pins.txt --no-build-isolation . \
    && pip check

FROM ${PYTHON}
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin pdserve
COPY --from=build /opt/pdserve /opt/pdserve
ENV PATH=/opt/pdserve/bin:$PATH PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
USER 10001
WORKDIR /home/pdserve
EXPOSE 8000 8001
ENTRYPOINT ["pdserve"]
CMD ["serve"]
