"""Gradients of one batch: the model's own step with its optimizer's `apply` intercepted."""
