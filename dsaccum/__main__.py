"""``python -m dsaccum``."""

import sys

from dsaccum.cli import main

sys.exit(main())
