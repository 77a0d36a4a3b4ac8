"""Frontends turn a user's call into a captured call: from the Python function itself, or from a graph of Dynamo."""
