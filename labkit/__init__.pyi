from labkit.core.errors import CannotSend as CannotSend
from labkit.core.errors import LabkitError as LabkitError
from labkit.core.errors import RankFailed as RankFailed
from labkit.core.errors import ResultUnavailable as ResultUnavailable
from labkit.core.errors import RunDirectoryError as RunDirectoryError
from labkit.core.errors import RunInProgress as RunInProgress
from labkit.core.errors import RunStalled as RunStalled
from labkit.core.errors import RunTimedOut as RunTimedOut
from labkit.core.errors import StartFailed as StartFailed
from labkit.core.models import GPT as GPT
from labkit.core.models import MLP as MLP
from labkit.driver.launcher import launch as launch
from labkit.driver.launcher import start as start
from labkit.driver.ranks import Ranks as Ranks
from labkit.driver.run import Run as Run
from labkit.driver.run import open_run as open_run
from labkit.driver.run import runs as runs
from labkit.driver.setup import setup as setup
from labkit.worker.data.batches import batches as batches
from labkit.worker.data.digits import Digits as Digits
from labkit.worker.data.text import Text as Text
from labkit.worker.models.build import build as build

__version__: str
