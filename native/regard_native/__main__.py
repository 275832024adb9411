"""`python -m regard_native` is the command `regard-native`."""

import sys

from regard_native.cli import main

sys.exit(main())
