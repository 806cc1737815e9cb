# One model file and a shell's cp: what the demo's loader Job runs to fill the model volume.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
ARG MODEL
COPY ${MODEL} /models/
USER 65532:65532
ENTRYPOINT ["cp", "--recursive", "--no-target-directory", "/models"]
CMD ["/volume"]
