"""Static graphs: modes, sizes, dispatch, capture and replay."""
