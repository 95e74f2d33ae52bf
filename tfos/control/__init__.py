"""The control plane between the driver and the nodes' supervisors: gRPC with mutual TLS."""
