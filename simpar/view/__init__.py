"""Views of traces as plotly figures; nothing else in simpar draws."""
