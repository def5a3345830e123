"""Container images: references, engine, build, push and smoke tests."""
