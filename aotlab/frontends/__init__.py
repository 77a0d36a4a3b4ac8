"""Where programs come from: a direct call, or Dynamo."""
