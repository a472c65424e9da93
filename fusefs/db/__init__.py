"""Postgres (layer 2): the only package that imports psycopg."""
