"""Browser tests.

They are a package, so that pytest ends its fixtures before other tests run. Playwright's event loop runs in the thread
of the tests, and another test could not start a second loop in that thread.
"""
