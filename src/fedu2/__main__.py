import sys

from fedu2.cli import main

sys.exit(main())
