"""Run workers in this process, as gloo processes or under Ray, and report their failures."""
