"""Derivatives of derivatives: graphs made when a backward is itself differentiated."""
