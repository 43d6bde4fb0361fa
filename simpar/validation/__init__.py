"""Measured runs beside their predictions: reads tables, predicts rows with the ordinary engine, reports the error."""
