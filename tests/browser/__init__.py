"""Browser tests; a package, so that pytest ends its fixtures when it goes on to other tests.

Playwright's event loop runs in the thread of the tests, and a test elsewhere could not start one of its own beside it.
"""
