"""Starts a process in a session of its own, says who they are, and waits."""

import os
import subprocess
import sys
import time

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
if "--and-end" not in sys.argv:
    time.sleep(600)
