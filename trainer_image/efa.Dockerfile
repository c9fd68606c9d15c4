# A base for the trainer's image on AWS instances with EFA: Python, libfabric and aws-ofi-nccl, by which NCCL finds EFA.
# CUDA comes with torch's own packages, the driver from the node. From the repository's root:
#   docker build -f trainer_image/efa.Dockerfile -t muster-efa-base:0.1.0 trainer_image
#   docker build -f trainer_image/Dockerfile --build-arg BASE_IMAGE=muster-efa-base:0.1.0 -t muster-trainer:0.1.0-efa .
ARG BASE_IMAGE=docker.io/library/ubuntu:24.04

FROM ${BASE_IMAGE}
# From 1.40 on the installer brings aws-ofi-nccl too.
ARG EFA_INSTALLER_VERSION=1.48.0
ARG EFA_INSTALLER_URL=https://efa-installer.amazonaws.com
# The kernel module and the limits are the node's; there is no EFA to verify while an image is built.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates curl python3 python3-venv \
    && curl -fsSL --retry 3 "$EFA_INSTALLER_URL/aws-efa-installer-$EFA_INSTALLER_VERSION.tar.gz" | tar -xz -C /tmp \
    && cd /tmp/aws-efa-installer \
    && ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify \
    && rm -rf /tmp/aws-efa-installer /var/lib/apt/lists/* /opt/amazon/openmpi* \
    && ldconfig \
    && test -n "$(find /opt/amazon/ofi-nccl/ -name 'libnccl-net*.so')"
ENV PATH=/opt/amazon/efa/bin:$PATH \
    LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu:/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib
