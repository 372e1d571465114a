"""The control plane: registry, autoscaler, rollouts, scalers."""
